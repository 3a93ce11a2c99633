from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from lightning_3d.parallel.tensor.proof.turns import run_in_turns
from lightning_3d.shards.group import ShardGroup, ShardOptions


def test_ranks_draw_as_if_they_were_alone() -> None:
    """Each draws before, between and after collectives."""

    def rank(group: ShardGroup) -> tuple[float, ...]:
        torch.manual_seed(7)
        random.seed(7)
        drawn = [float(torch.rand(())), random.random()]
        group.sum(torch.ones(2))
        drawn += [float(torch.rand(())), random.random()]
        group.gather(torch.rand(2), 0, (6,))
        return (*drawn, float(torch.rand(())))

    first, *others = run_in_turns(3, rank, options=ShardOptions(), timeout=30)
    assert len(set(first)) == 5
    assert others == [first, first]


def test_only_one_rank_runs_at_a_time() -> None:
    running: set[int] = set()

    def rank(group: ShardGroup) -> int:
        most = 0
        for _ in range(20):
            running.add(group.rank)
            threading.Event().wait(0.001)
            most = max(most, len(running))
            running.discard(group.rank)
            group.max(torch.ones(1))
        return most

    assert run_in_turns(3, rank, options=ShardOptions(), timeout=30) == [1, 1, 1]


def test_collectives_are_those_of_the_ranks() -> None:
    def rank(group: ShardGroup) -> list[Tensor]:
        own = torch.arange(2.0) + 10 * group.rank
        return [group.sum(own), group.max(own), group.gather(own, 0, (4,)), group.sum_part(own, 0)]

    for index, found in enumerate(run_in_turns(2, rank, options=ShardOptions(), timeout=30)):
        assert [value.tolist() for value in found] == [[10, 12], [10, 11], [0, 1, 10, 11], [[10], [12]][index]]


def test_options_arrive_and_gathers_are_told_nobody() -> None:
    def rank(group: ShardGroup) -> tuple[bool, bool]:
        return group.options.sequence, group.first_gather("sort", "model.py:1")

    assert run_in_turns(2, rank, options=ShardOptions(sequence=True), timeout=30) == [(True, False)] * 2


def test_a_rank_that_fails_frees_the_others() -> None:
    def rank(group: ShardGroup) -> None:
        group.sum(torch.ones(1))
        if group.rank == 1:
            raise RuntimeError("rank 1")
        group.sum(torch.ones(1))

    with pytest.raises(RuntimeError, match="rank 1"):
        run_in_turns(3, rank, options=ShardOptions(), timeout=30)
