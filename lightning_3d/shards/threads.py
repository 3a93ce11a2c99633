"""Ranks that are threads of one process: the same collectives without processes, for proofs and tests."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_3d.shards.group import ShardGroup, ShardOptions
from lightning_3d.shards.layout import join, padded

_Result = TypeVar("_Result")

# Seconds that a rank waits for the others where nobody says otherwise; proofs do.
TIMEOUT = 60.0


class Meeting:
    """Where the threads of a group lay down what they exchange.

    Args:
        size: Number of threads.
        timeout: Seconds that one waits for the others.
    """

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._calls: list[str] = [""] * size
        self._nothing = torch.empty(0)
        self._values = [self._nothing] * size

    def exchange(self, rank: int, call: str, value: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Waits for the values of all ranks and combines them.

        Args:
            rank: Who calls.
            call: What the ranks do together; must be alike on all.
            value: This rank's part.
            combine: Makes a new tensor of the values of all ranks, in order.

        Raises:
            threading.BrokenBarrierError: Another rank failed or did not come in time.
        """
        self._calls[rank] = call
        self._values[rank] = value.detach()
        self._barrier.wait()
        assert len(set(self._calls)) == 1, f"ranks meet in different collectives: {self._calls}"
        with torch.no_grad():
            combined = combine(self._values)
        # Nobody may change or replace a value that another one still reads.
        self._barrier.wait()
        self._values[rank] = self._nothing
        return combined

    def abort(self) -> None:
        """Frees all who wait, now and later, with an error."""
        self._barrier.abort()


class ThreadShardGroup(ShardGroup):
    """Ranks that are threads. For CPU tensors: their backward runs in the thread that calls it.

    Sums are taken in the order of the ranks, so that every rank has the same bits.

    Args:
        meeting: Shared by all ranks of the group.
        rank: This one's position.
        options: How operations behave.
    """

    def __init__(self, meeting: Meeting, rank: int, options: ShardOptions | None = None) -> None:
        super().__init__(meeting.size, rank, options)
        self._meeting = meeting

    def sum(self, value: Tensor) -> Tensor:
        """Adds the values."""
        return self._exchange("sum", value, _total)

    def max(self, value: Tensor) -> Tensor:
        """Takes the largest."""
        return self._exchange("max", value, lambda values: functools.reduce(torch.maximum, values).clone())

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """Joins the parts."""
        mine = padded(part, dim, segments, self.size)
        return self._exchange(f"gather {dim} {tuple(segments)}", mine, lambda parts: join(parts, dim, segments))

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Adds this rank's part of the values."""
        length = value.shape[dim] // self.size
        start = self.rank * length
        return self._exchange(
            f"sum_part {dim}", value, lambda values: _total([each.narrow(dim, start, length) for each in values])
        )

    def _exchange(self, name: str, value: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        return self._meeting.exchange(self.rank, f"{name} {tuple(value.shape)} {value.dtype}", value, combine)


def run_threads(
    size: int,
    function: Callable[[ThreadShardGroup], _Result],
    *,
    options: ShardOptions | None = None,
    timeout: float = TIMEOUT,
) -> list[_Result]:
    """Calls a function once per rank, each in its own thread, and returns the results in order.

    The threads start with torch's defaults: gradients on, no modes, no autocast. They share the default generator.

    Args:
        size: Number of ranks.
        function: Gets its rank's group.
        options: Of the groups.
        timeout: Seconds that a rank waits for the others in a collective.

    Raises:
        BaseException: What the first rank that failed by itself raised; the others are freed, so that none hangs.
        threading.BrokenBarrierError: No rank failed, but some waited for a collective that others never called.
    """
    meeting = Meeting(size, timeout)
    results: dict[int, _Result] = {}
    failures: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadShardGroup(meeting, rank, options))
        except BaseException as failure:
            failures[rank] = failure
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        own = [failure for failure in failures.values() if not isinstance(failure, threading.BrokenBarrierError)]
        raise (own or list(failures.values()))[0]
    return [results[rank] for rank in range(size)]


def _total(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values[1:], values[0].clone(memory_format=torch.contiguous_format))
