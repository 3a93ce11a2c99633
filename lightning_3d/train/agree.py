"""Ranks that a launcher outside has started: rank 0 reads the command line, the others repeat its jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch._C._distributed_c10d import Store

from lightning_3d.config.compose import run_hydra, with_overrides
from lightning_3d.config.schema import RunConfig
from lightning_3d.faults.agent import tell_agent
from lightning_3d.strategy.faults.restarts import agent_directory
from lightning_3d.strategy.launch.meeting import meet
from lightning_3d.strategy.launch.rank_command import path_override, rank_arguments

Job: TypeAlias = Callable[[DictConfig], Any]
Announce: TypeAlias = Callable[[RunConfig], None]
_Message: TypeAlias = dict[str, list[str]]

# A rank may wait for rank 0 while that chooses the next job of a sweep.
_PATIENCE = timedelta(hours=1)
_ARGUMENTS, _DIRECTORY = "arguments", "directory"
_DIRECTORY_NOTE = "lightning_3d.directory"


def run_together(make_job: Callable[[Announce], Job], arguments: Sequence[str]) -> None:
    """Runs the same jobs on every rank, each in the directory that rank 0 chose.

    That directory and ``ckpt_path`` are those of rank 0 in full, so ranks with other working directories use them
    too: between hosts they must lie on storage that all share. Other relative paths, such as those of the data,
    start at each rank's own working directory. A job that torchrun starts again goes on in the directory that it had.

    Args:
        make_job: Makes the task of one job from a function to call once the job's configuration is known to be good.
        arguments: Hydra's flags and overrides, of which rank 0's count.
    """
    store, rank, _ = meet("jobs", _PATIENCE)
    board = _Board(store)
    if rank == 0:
        try:
            run_hydra(make_job(lambda run: board.write(_to_repeat(run))), with_overrides(arguments, _as_before()))
        except Exception as error:
            tell_agent(error)
            raise
        finally:
            board.write(None)
        return
    while (repeated := board.read()) is not None:
        run_hydra(make_job(lambda run: None), repeated)


def _as_before() -> list[str]:
    """Returns the override with which an earlier attempt of this job on this node had its directory."""
    agent = agent_directory()
    note = None if agent is None else agent / _DIRECTORY_NOTE
    return [note.read_text()] if note is not None and note.exists() else []


def _note_directory(override: str) -> None:
    agent = agent_directory()
    if agent is not None and os.environ.get("LOCAL_RANK") == "0":
        (agent / _DIRECTORY_NOTE).write_text(override)


def _directory_override() -> str:
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return path_override("hydra.sweep.dir", str(Path(job.sweep.dir).absolute()))
    return path_override("hydra.run.dir", str(job.runtime.output_dir))


def _to_repeat(run: RunConfig) -> _Message:
    checkpoint = [] if run.ckpt_path is None else [path_override("ckpt_path", run.ckpt_path)]
    return {_ARGUMENTS: [*rank_arguments(), *checkpoint], _DIRECTORY: [_directory_override()]}


class _Board:
    """Hydra's arguments of one job after the other, in a store that every rank sees; None after the last.

    Each node notes where the job lies.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = count()

    def write(self, message: _Message | None) -> None:
        self._store.set(self._next(), json.dumps(message))
        self._note(message)

    def read(self) -> list[str] | None:
        message: _Message | None = json.loads(self._store.get(self._next()))
        self._note(message)
        return None if message is None else message[_ARGUMENTS]

    @staticmethod
    def _note(message: _Message | None) -> None:
        if message is not None:
            _note_directory(*message[_DIRECTORY])

    def _next(self) -> str:
        return f"job_{next(self._numbers)}"
