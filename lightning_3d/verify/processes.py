"""Ranks that are processes of this machine: started for one job, and gone when it ends, fails or takes too long."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from lightning_3d.errors import Lightning3DError, RunError

_PR_SET_PDEATHSIG = 1
# Once a rank has failed, the others get this long to fail as well; their errors say less.
_GRACE_SECONDS = 2.0
_STACK_SECONDS = 1.0
_MOST_OUTPUT = 2000
_MOST_CALLS = 16
# Imported once, in the process that ranks are forked from; it never computes, so that a fork of it is whole.
_PRELOAD = ("lightning_3d.verify.job", "torch.distributed.fsdp")
# What launchers outside and seeds leave in the environment.
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "NODE_RANK")

Job = Callable[[int, Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """How ranks are started.

    Attributes:
        directory: Where they leave what they print.
        seconds: Time that a job may take, all in all.
        preload: Modules that their code needs, imported before they are forked.
    """

    directory: Path
    seconds: float
    preload: tuple[str, ...] = ()

    def run(self, job: Job, world: int, order: Any) -> list[Any]:
        """Runs ``job(rank, order)`` on ranks and returns what each gave, in order.

        Args:
            job: A function at the top of a module.
            world: Number of ranks.
            order: What they are told; it must pickle.

        Raises:
            Lightning3DError: One that a rank raised.
            RunError: A rank failed otherwise, died, or was still running at the end of the time; all were killed.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *self.preload])
        limit = timedelta(seconds=self.seconds)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        seat = _Seat(
            world=world,
            port=store.port,
            seconds=self.seconds,
            directory=os.getcwd(),
            path=tuple(sys.path),
            environment={name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)},
        )
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ranks.append(_Rank(context, rank, seat, (job, order), self.directory))
            return _collect(ranks, self.seconds)
        finally:
            for each in ranks:
                each.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seat:
    """What the ranks of one job have in common."""

    world: int
    port: int
    seconds: float
    directory: str
    path: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """How a job ended on a rank: its result, or an error of ours, or a traceback."""

    result: Any = None
    error: Lightning3DError | None = None
    traceback: str = ""


class _Rank:
    """This process' end of a rank."""

    def __init__(self, context: Any, rank: int, seat: _Seat, task: tuple[Job, Any], directory: Path) -> None:
        self.rank = rank
        self._output, self._stack = directory / f"rank{rank}.txt", directory / f"rank{rank}.stack"
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(rank, seat, task, theirs, self._output, self._stack))
        self._process.start()
        theirs.close()

    def receive(self) -> _Reply:
        """Returns the reply that has come, or what became of the process."""
        try:
            reply: _Reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_SECONDS)
            return _Reply(traceback=f"the process died with exit code {self._process.exitcode}\n{self.output()}")
        return reply

    def stack(self) -> str:
        """Returns where the process is, the innermost call first."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not _text(self._stack):
            time.sleep(0.02)
        return "\n".join(_text(self._stack).splitlines()[:_MOST_CALLS]) or "(no stack)"

    def output(self) -> str:
        """Returns the end of what the process printed."""
        return _text(self._output)[-_MOST_OUTPUT:]

    def kill(self) -> None:
        """Ends the process and what it has started; returns when it is gone."""
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _collect(ranks: Sequence[_Rank], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, _Reply]] = []
    deadline = time.monotonic() + seconds
    while len(results) + len(failures) < len(ranks):
        known = {*results, *(rank for rank, _ in failures)}
        waiting = {each.connection: each for each in ranks if each.rank not in known}
        ready: Iterable[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            reply = waiting[connection].receive()
            if reply.error is None and not reply.traceback:
                results[waiting[connection].rank] = reply.result
            else:
                failures.append((waiting[connection].rank, reply))
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        _raise(failures, len(ranks))
    late = [each for each in ranks if each.rank not in results]
    if late:
        where = "\n".join(f"---- rank {each.rank} ----\n{each.stack().rstrip()}" for each in late)
        raise RunError(
            f"{len(late)} of {len(ranks)} ranks were still running after {seconds:g} s, and were killed:\n{where}",
            fix="a longer time limit, fewer layers, or fewer steps",
        )
    return [results[each.rank] for each in ranks]


def _raise(failures: Sequence[tuple[int, _Reply]], world: int) -> None:
    ours = next((reply.error for _, reply in failures if reply.error is not None), None)
    if ours is not None:
        raise ours
    rank, reply = failures[0]
    raise RunError(f"rank {rank} of {world} failed:\n{reply.traceback.rstrip()}")


def _serve(rank: int, seat: _Seat, task: tuple[Job, Any], connection: Connection, output: Path, stack: Path) -> None:
    # A rank must not outlive the process that watches it, and a kill must reach what the rank has started.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    with output.open("w", buffering=1) as file, stack.open("w") as calls:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        faulthandler.register(signal.SIGUSR1, file=calls, all_threads=False)
        multiprocessing.set_start_method("fork", force=True)
        # The process that ranks are forked from has those of the time when it began.
        os.environ.clear()
        os.environ.update(seat.environment)
        os.environ.update(_environment(rank, seat))
        os.chdir(seat.directory)
        sys.path[:] = seat.path
        torch.set_num_threads(1)
        answer = _answer(rank, task)
        for text in (sys.stdout, sys.stderr):
            text.flush()
        connection.send_bytes(answer)
    # Threads of process groups that others have left already would hold the process up.
    os._exit(0)


def _answer(rank: int, task: tuple[Job, Any]) -> bytes:
    job, order = task
    try:
        return pickle.dumps(_Reply(result=job(rank, order)))
    except Lightning3DError as error:
        return pickle.dumps(_Reply(error=error))
    except BaseException:
        return pickle.dumps(_Reply(traceback=traceback.format_exc()))


def _environment(rank: int, seat: _Seat) -> dict[str, str]:
    """What torchrun sets, so that a Trainer inside starts nothing; the store is held outside, so no port is taken."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(seat.world),
        "LOCAL_WORLD_SIZE": str(seat.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(seat.port),
        "TORCHELASTIC_RUN_ID": "verify",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
