"""Ranks that a launcher outside has started: rank 0 reads the command line, the others repeat its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from omegaconf import DictConfig
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_3d.config.compose import run_hydra
from lightning_3d.strategy.launcher import rank_arguments

Job = Callable[[DictConfig], Any]

# A rank may wait for rank 0 while that chooses the next job of a sweep.
_PATIENCE = timedelta(hours=1)


def run_together(make_job: Callable[[Callable[[], None]], Job], arguments: Sequence[str]) -> None:
    """Runs the same jobs on every rank, each in the directory that rank 0 chose.

    That directory is absolute, so ranks with other working directories use it too: between hosts it must lie on
    storage that they share. Relative paths inside a configuration start at each rank's own working directory.

    Args:
        make_job: Makes the task of one job from a function to call once the job's configuration is known to be good.
        arguments: Hydra's flags and overrides, of which rank 0's count.
    """
    store, rank, _ = next(rendezvous("env://", timeout=_PATIENCE))
    board = _Board(PrefixStore("lightning_3d", store))
    if rank == 0:
        try:
            run_hydra(make_job(lambda: board.write(rank_arguments())), arguments)
        finally:
            board.write(None)
        return
    while (repeated := board.read()) is not None:
        run_hydra(make_job(lambda: None), repeated)


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
