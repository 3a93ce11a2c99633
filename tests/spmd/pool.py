"""Runs a function on several gloo processes that are started once and kept for the whole test session."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import connection as mp_connection
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.spmd.worker import Call, Reply, serve

MOST_RANKS = 8
# After one rank has failed, the others get this long to notice and to tell.
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5
# What keeps a process group alive keeps its threads, and each of gloo's wakes up a hundred times a second.
_MOST_THREADS = 48


class SpmdError(AssertionError):
    """Some ranks failed, died or hung.

    Args:
        function: Name of the function that ran.
        reports: Rank to traceback, or to what became of it; the rank that failed first comes first.
    """

    def __init__(self, function: str, world: int, reports: dict[int, str]) -> None:
        self.reports = reports
        ranks = ", ".join(map(str, reports))
        parts = [f"{function} failed on {len(reports)} of {world} ranks (first to last: {ranks})"]
        parts += [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in reports.items()]
        super().__init__("\n".join(parts))


class Worker:
    """The parent's end of one rank's process."""

    def __init__(self, rank: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, in the process that workers are forked from.
        context.set_forkserver_preload(["tests.spmd.worker", "tests.spmd.preloaded", "pytest"])
        self.stacks = directory / f"rank{rank}.stack"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(rank, theirs, str(self.stacks)), name=f"rank {rank}")
        self.process.start()
        theirs.close()

    @property
    def threads(self) -> int:
        """Threads of the process."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 1

    def stack(self) -> str:
        """Returns where the process is right now."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not self._stack_text():
            time.sleep(0.02)
        return self._stack_text() or "(no stack)"

    def kill(self) -> None:
        """Ends the process and what it has started; returns when it is gone."""
        assert self.process.pid is not None
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                end(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()

    def _stack_text(self) -> str:
        return self.stacks.read_text() if self.stacks.exists() else ""


class Pool:
    """Workers by rank, started when first needed and again after they were killed."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="spmd-")
        self._workers: dict[int, Worker] = {}

    def run(
        self,
        task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        world: int,
        *,
        timeout: float,
        process_group: bool,
    ) -> list[Any]:
        """See `run_spmd`."""
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        call = Call(
            payload=pickle.dumps(task),
            world=world,
            port=store.port,
            timeout=timeout,
            process_group=process_group,
            environment=dict(os.environ),
            directory=os.getcwd(),
            path=list(sys.path),
            filters=list(warnings.filters),
        )
        workers = self._ready(world)
        try:
            for worker in workers.values():
                worker.connection.send_bytes(pickle.dumps(call))
            replies = _collect(workers, timeout)
        except BaseException:
            self._drop(workers)
            raise
        in_order = sorted(replies.items(), key=lambda item: item[1].ended)
        failed = {rank: reply.traceback for rank, reply in in_order if reply.traceback is not None}
        if failed:
            self._drop(workers)
            raise SpmdError(task[0].__qualname__, world, failed)
        self._drop([rank for rank, worker in workers.items() if worker.threads > _MOST_THREADS])
        return [pickle.loads(replies[rank].result) for rank in range(world)]

    def processes(self) -> dict[int, int]:
        """Returns the process id of each rank's worker."""
        return {rank: worker.process.pid or 0 for rank, worker in self._workers.items()}

    def close(self) -> None:
        """Ends all workers and the process that they were forked from."""
        self._drop(self._workers)
        # It would end with this process, but a moment later.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        self._directory.cleanup()

    def _ready(self, world: int) -> dict[int, Worker]:
        for rank in range(world):
            worker = self._workers.get(rank)
            if worker is not None and not worker.process.is_alive():
                self._drop([rank])
            if rank not in self._workers:
                self._workers[rank] = Worker(rank, Path(self._directory.name))
        return {rank: self._workers[rank] for rank in range(world)}

    def _drop(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            self._workers.pop(rank).kill()


def _collect(workers: dict[int, Worker], timeout: float) -> dict[int, Reply]:
    """Waits for every rank's reply; those that die or outlast the time limit are given one."""
    replies: dict[int, Reply] = {}
    deadline = time.monotonic() + timeout
    while len(replies) < len(workers):
        waiting = {rank: worker for rank, worker in workers.items() if rank not in replies}
        handles: dict[Any, int] = {worker.connection: rank for rank, worker in waiting.items()}
        ready = mp_connection.wait(list(handles), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _give_up(waiting, replies, timeout)
            return replies
        for handle in ready:
            rank = handles[handle]
            replies[rank] = _receive(workers[rank])
            if replies[rank].traceback is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return replies


def _receive(worker: Worker) -> Reply:
    try:
        reply: Reply = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Reply(ended=time.monotonic(), traceback=f"the process died with exit code {worker.process.exitcode}")
    return reply


def _give_up(waiting: dict[int, Worker], replies: dict[int, Reply], timeout: float) -> None:
    others_failed = any(reply.traceback is not None for reply in replies.values())
    reason = "still running after another rank had failed" if others_failed else f"still running after {timeout:g} s"
    for rank, worker in waiting.items():
        replies[rank] = Reply(ended=time.monotonic(), traceback=f"{reason}, killed here:\n{worker.stack()}")


@functools.cache
def shared_pool() -> Pool:
    """Returns the session's pool; it ends with this process at the latest."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


def end_processes() -> None:
    """Ends the shared pool, if there is one, and the process that all are forked from; the next call starts them anew.

    That process ends when the last one that was forked from it is gone, so to end it alone would wait for the pool.
    """
    if shared_pool.cache_info().currsize:
        shared_pool().close()
        shared_pool.cache_clear()
    else:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def run_spmd(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 100,
    process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Runs ``function(rank, world, *args, **kwargs)`` on gloo processes and returns each rank's result.

    Each call starts from the caller's environment, directory, ``sys.path`` and warning filters, with fresh seeds and
    torch defaults, in a process group of its own. The launcher's variables are set as torchrun sets them, so a
    Trainer works inside.

    Args:
        function: Defined at the top of a module; results and arguments must pickle (plain tensors do).
        world: Number of ranks, at most `MOST_RANKS`.
        *args: Passed on.
        timeout: Seconds until all ranks are killed.
        process_group: False leaves it to the function to make the default process group.
        **kwargs: Passed on.

    Raises:
        SpmdError: A rank raised, died or was still running at the time limit; it holds every rank's traceback.
    """
    if not 1 <= world <= MOST_RANKS:
        raise ValueError(f"a world of {world} ranks; the pool has 1 to {MOST_RANKS}")
    return shared_pool().run((function, args, kwargs), world, timeout=timeout, process_group=process_group)
