"""Ranks that are threads: the collectives, and that a failure frees everybody."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from lightning_3d.shards.threads import ThreadShardGroup, run_threads

SIZE = 4


def value(rank: int) -> Tensor:
    return torch.tensor([[1.0, 2.0, 4.0, 8.0], [3.0, 5.0, 7.0, 9.0]]) * (-1) ** rank * (rank + 1)


def test_collectives_are_those_of_the_whole() -> None:
    values = torch.stack([value(rank) for rank in range(SIZE)])

    def fn(group: ThreadShardGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine = value(group.rank)
        return group.sum(mine), group.max(mine), group.gather(mine, 1, (8, 8)), group.sum_part(mine, 1)

    for rank, (total, largest, gathered, part) in enumerate(run_threads(SIZE, fn)):
        assert torch.equal(total, values.sum(0))
        assert torch.equal(largest, values.amax(0))
        halves = [values[:, :, :2], values[:, :, 2:]]
        assert torch.equal(gathered, torch.cat([torch.cat(list(half), 1) for half in halves], 1))
        assert torch.equal(part, values.sum(0)[:, rank : rank + 1])


def test_results_are_new_tensors_and_values_may_change_at_once() -> None:
    def fn(group: ThreadShardGroup) -> Tensor:
        mine = torch.full((2,), float(group.rank))
        for _ in range(50):
            total = group.sum(mine)
            mine += 1
        return total

    for total in run_threads(2, fn):
        assert torch.equal(total, torch.full((2,), 99.0))


def test_one_rank_gets_a_copy() -> None:
    mine = torch.ones(2)
    for result in run_threads(1, lambda group: (group.sum(mine), group.max(mine), group.sum_part(mine, 0)))[0]:
        assert torch.equal(result, mine)
        assert result.data_ptr() != mine.data_ptr()


def test_a_failure_frees_the_others_and_is_raised() -> None:
    def fn(group: ThreadShardGroup) -> None:
        if group.rank == 2:
            raise KeyError("mine")
        group.sum(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_threads(SIZE, fn)
    assert time.monotonic() - start < 10


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    def fn(group: ThreadShardGroup) -> None:
        if group.rank:
            group.sum(torch.ones(1))

    with pytest.raises(threading.BrokenBarrierError):
        run_threads(2, fn, timeout=0.1)


def test_different_collectives_are_told() -> None:
    def fn(group: ThreadShardGroup) -> None:
        group.sum(torch.ones(1 + group.rank))

    with pytest.raises(AssertionError, match=r"sum \(1,\).*sum \(2,\)"):
        run_threads(2, fn)
