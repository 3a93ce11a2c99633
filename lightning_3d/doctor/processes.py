"""The processes of a measurement: started for it, and gone when it ends, fails or takes too long."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lightning_3d.doctor.rank import Task, measure
from lightning_3d.doctor.speeds import Measured
from lightning_3d.errors import RunError


def measure_here(task: Task) -> Measured:
    """Measures with processes of this machine.

    Args:
        task: What to measure.

    Raises:
        RunError: A process failed, or the measurement took too long; all were killed.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(task.spec.world):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve, args=(task, rank, f"file://{Path(folder, 'meet')}", theirs), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[mine] = rank
            return _collected(pipes, task.seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def measure_launched(task: Task) -> Measured | None:
    """Measures as one of the ranks that a launcher has started, on one node or several.

    Args:
        task: What to measure.

    Returns:
        What was found on rank 0, None on the others.
    """
    return measure(task, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), "env://")


def _serve(task: Task, rank: int, init: str, connection: Connection) -> None:
    try:
        connection.send((measure(task, rank, rank, init), ""))
    except BaseException:
        connection.send((None, traceback.format_exc()))


def _collected(pipes: dict[Any, int], seconds: float) -> Measured:
    deadline, waiting = time.monotonic() + seconds, dict(pipes)
    found: Measured | None = None
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(map(str, sorted(waiting.values())))
            raise RunError(
                f"the measurement was not over after {seconds:.0f} s; rank {ranks} was still running.",
                fix="a larger seconds=..., or smaller sizes=[...]",
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                result, failure = pipe.recv()
            except EOFError:
                raise RunError(
                    f"rank {rank} of the measurement has died.", fix="look at the memory of the machine"
                ) from None
            if failure:
                raise RunError(f"rank {rank} of the measurement failed:\n{failure}")
            found = result or found
    assert found is not None, "rank 0 has told"
    return found
