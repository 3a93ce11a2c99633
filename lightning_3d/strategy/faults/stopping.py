"""Ranks that stop at an exception: whether all of them have, asked without a collective that would hang."""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from lightning_3d.checkpoint.agreement import gather

_DECIDED = "decided"
_NOBODY = "nobody"
_PAUSE_SECONDS = 0.02
# Ranks that fail at the same place are this close to each other. Those that have not failed are ended a moment later
# (faults.watch); before that, collectives that break tell them what has happened.
_SECONDS_TO_STOP = 2.0


class CommonStop:
    """Whether all ranks stop together, found out once. Made by all ranks; a collective call.

    Args:
        group: All ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # A store may outlive groups, and what their ranks have left there.
        self._name = gather(group, uuid.uuid4().hex)[0] if group.size() > 1 else ""
        self._missing: tuple[int, ...] | None = None

    @property
    def all_stopped(self) -> bool:
        """Whether it was asked, and found out that all ranks have stopped together."""
        return self._missing == ()

    def missing(self) -> tuple[int, ...]:
        """Returns the ranks that go on while this one has stopped; none if all have, or there is no other."""
        if self._missing is None:
            self._missing = self._found() if self._group.size() > 1 else ()
        return self._missing

    def _found(self) -> tuple[int, ...]:
        store = PrefixStore(f"lightning_3d/stopped/{self._name}", _get_default_store())
        try:
            return missing_ranks(store, self._group.rank(), self._group.size(), _SECONDS_TO_STOP)
        except dist.DistError:
            # Rank 0 holds the store, and is gone.
            return (0,)


def missing_ranks(store: Store, rank: int, world: int, seconds: float) -> tuple[int, ...]:
    """Tells the others that this rank has stopped, and waits until they have.

    Every rank gets the same answer, that of the first that could decide.

    Args:
        store: What the ranks share, used for nothing else.
        rank: This rank.
        world: How many ranks there are.
        seconds: How long to wait.

    Returns:
        The ranks that had not stopped in time; none if all ranks have stopped together.
    """
    everyone = [str(other) for other in range(world)]
    store.set(str(rank), "stopped")
    end = time.monotonic() + seconds
    while not store.check(everyone) and not store.check([_DECIDED]) and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    missing = ",".join(other for other in everyone if not store.check([other]))
    decided = store.compare_set(_DECIDED, "", missing or _NOBODY).decode()
    return () if decided == _NOBODY else tuple(int(other) for other in decided.split(","))
