"""Ranks that a launcher outside has started: rank 0 reads the command line, the others repeat its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeAlias

from omegaconf import DictConfig
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_3d.config.compose import run_hydra
from lightning_3d.config.schema import RunConfig
from lightning_3d.strategy.launch.rank_command import path_override, rank_arguments

Job: TypeAlias = Callable[[DictConfig], Any]
Announce: TypeAlias = Callable[[RunConfig], None]

# A rank may wait for rank 0 while that chooses the next job of a sweep.
_PATIENCE = timedelta(hours=1)


def run_together(make_job: Callable[[Announce], Job], arguments: Sequence[str]) -> None:
    """Runs the same jobs on every rank, each in the directory that rank 0 chose.

    That directory and ``ckpt_path`` are those of rank 0 in full, so ranks with other working directories use them
    too: between hosts they must lie on storage that all share. Other relative paths, such as those of the data,
    start at each rank's own working directory.

    Args:
        make_job: Makes the task of one job from a function to call once the job's configuration is known to be good.
        arguments: Hydra's flags and overrides, of which rank 0's count.
    """
    store, rank, _ = next(rendezvous("env://", timeout=_PATIENCE))
    board = _Board(PrefixStore("lightning_3d", store))
    if rank == 0:
        try:
            run_hydra(make_job(lambda run: board.write(_to_repeat(run))), arguments)
        finally:
            board.write(None)
        return
    while (repeated := board.read()) is not None:
        run_hydra(make_job(lambda run: None), repeated)


def _to_repeat(run: RunConfig) -> list[str]:
    checkpoint = [] if run.ckpt_path is None else [path_override("ckpt_path", run.ckpt_path)]
    return [*rank_arguments(), *checkpoint]


class _Board:
    """Hydra's arguments of one job after the other, in a store that every rank sees; None after the last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = count()

    def write(self, arguments: list[str] | None) -> None:
        self._store.set(self._next(), json.dumps(arguments))

    def read(self) -> list[str] | None:
        arguments: list[str] | None = json.loads(self._store.get(self._next()))
        return arguments

    def _next(self) -> str:
        return f"job_{next(self._numbers)}"
