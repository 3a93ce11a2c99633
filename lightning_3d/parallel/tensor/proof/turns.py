"""Ranks that are threads and run in turns, so that each has random states of its own, as a process has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor

from lightning_3d.shards.group import ShardGroup, ShardOptions
from lightning_3d.shards.threads import ThreadShardGroup, run_threads

_Result = TypeVar("_Result")


class TurnGroup(ShardGroup):
    """A rank that lets others run while it waits for them, and finds torch's, Python's and numpy's random states again.

    Args:
        group: The rank itself.
        lock: Held by the rank whose turn it is.
    """

    def __init__(self, group: ThreadShardGroup, lock: threading.Lock) -> None:
        super().__init__(group.size, group.rank, group.options)
        self._inner = group
        self._lock = lock

    def sum(self, value: Tensor) -> Tensor:
        """Adds the values."""
        with self._others():
            return self._inner.sum(value)

    def max(self, value: Tensor) -> Tensor:
        """Takes the largest."""
        with self._others():
            return self._inner.max(value)

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """Joins the parts."""
        with self._others():
            return self._inner.gather(part, dim, segments)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Adds this rank's part of the values."""
        with self._others():
            return self._inner.sum_part(value, dim)

    def first_gather(self, operation: str, place: str) -> bool:
        """Returns False: what a trial gathers is told nobody."""
        return False

    @contextmanager
    def _others(self) -> Iterator[None]:
        states = _collect_rng_states(include_cuda=False)
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            _set_rng_states(states)


def run_in_turns(
    size: int, function: Callable[[ShardGroup], _Result], *, options: ShardOptions, timeout: float
) -> list[_Result]:
    """Calls a function once per rank and returns the results in order; only one rank runs at a time.

    Args:
        size: Number of ranks.
        function: Gets its rank's group. What it draws before its first collective begins anywhere, so it sets seeds.
        options: Of the groups.
        timeout: Seconds that a rank waits for all others.

    Raises:
        BaseException: What the first rank that failed raised.
    """
    lock = threading.Lock()

    def turn(group: ThreadShardGroup) -> _Result:
        with lock:
            return function(TurnGroup(group, lock))

    return run_threads(size, turn, options=options, timeout=timeout)
