from __future__ import annotations

import pytest
import torch

from lightning_3d.parallel.pipeline.cost import (
    boundary_traffic,
    pipeline_traffic,
    plan_timeline,
    receive_buffers,
)
from lightning_3d.parallel.pipeline.placement import ranks_of_stages
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.record.step import Origin, Value
from tests.spmd.pipeline_nets import ideal_bubble

STATE = Value(origin=Origin(kind="module", maker="block"), shape=(2, 5), dtype=torch.float32)
INDEX = Value(origin=Origin(kind="module", maker="router"), shape=(3,), dtype=torch.int64, requires_grad=False)


def _plan(schedule: str, ranks: int, per_rank: int, costs: tuple[float, ...] = ()) -> PipelinePlan:
    placed = ranks_of_stages(schedule, ranks, per_rank)
    stages = tuple(
        Stage(index=index, rank=rank, first=index, end=index + 1, cost=costs[index] if costs else 0.0)
        for index, rank in enumerate(placed)
    )
    return PipelinePlan(
        schedule=schedule,
        ranks=ranks,
        blocks=tuple(map(str, range(len(placed)))),
        stages=stages,
        holders={},
        modules={},
        boundaries=((), *((STATE, INDEX) for _ in placed[1:])),
    )


def test_boundaries() -> None:
    first, second, third = boundary_traffic(_plan("zbvzerobubble", 2, 2))
    assert str(first) == "stage 0 -> stage 1: rank 0 -> rank 1, 64 B forward, 40 B backward"
    assert str(second) == "stage 1 -> stage 2: rank 1 -> rank 1, not sent"
    assert (third.sender, third.receiver) == (1, 0)
    assert (third.forward, third.backward) == ((40, 24), (40,))


@pytest.mark.parametrize(
    ("schedule", "per_rank", "rank", "calls", "payload"),
    [
        # Six micro-batches: rank 0 sends states and indices, rank 1 gradients of states.
        ("1f1b", 1, 0, 12, 6 * 64),
        ("1f1b", 1, 1, 6, 6 * 40),
        # Stages 0 1 0 1: two boundaries from rank 0, one back to it.
        ("interleaved1f1b", 2, 0, 6 * 5, 6 * (2 * 64 + 40)),
        ("interleaved1f1b", 2, 1, 6 * 4, 6 * (64 + 2 * 40)),
        # Stages 0 1 1 0.
        ("zbvzerobubble", 2, 0, 6 * 3, 6 * (64 + 40)),
        ("zbvzerobubble", 2, 1, 6 * 3, 6 * (64 + 40)),
    ],
)
def test_traffic_of_an_optimizer_step(schedule: str, per_rank: int, rank: int, calls: int, payload: int) -> None:
    (row,) = pipeline_traffic(_plan(schedule, 2, per_rank), rank=rank, microbatches=3, batches=2).rows
    # Three micro-batches of interleaved schedules on two ranks are one round.
    assert (row.operation, row.axis, row.group_size) == ("send", "pipeline_parallel", 2)
    assert (row.calls, row.payload, row.wire) == (calls, payload, payload)


def test_empty_microbatches_are_sent_too() -> None:
    (row,) = pipeline_traffic(_plan("1f1b", 4, 1), rank=1, microbatches=1).rows
    assert row.calls == 4 * 3


def test_one_rank_sends_nothing() -> None:
    assert pipeline_traffic(_plan("1f1b", 1, 1), rank=0, microbatches=4).rows == ()


def test_receive_buffers() -> None:
    plan = _plan("1f1b", 3, 1)
    sizes = [receive_buffers(plan, rank=rank, microbatches=4) for rank in range(3)]
    assert sizes == [4 * 40, 4 * (64 + 40), 4 * 64]


def test_activations_in_flight() -> None:
    def in_flight(plan: PipelinePlan, sizes: list[float], microbatches: int, **options: bool) -> list[float]:
        timeline = plan_timeline(plan, microbatches=microbatches, **options)
        return [timeline.in_flight(rank, sizes) for rank in range(plan.ranks)]

    assert in_flight(_plan("gpipe", 2, 1), [100, 10], 5) == [500, 50]
    assert in_flight(_plan("1f1b", 2, 1), [100, 10], 5) == [200, 10]
    plan = _plan("interleavedzerobubble", 2, 2)
    assert in_flight(plan, [1] * 4, 4) == [4, 4]
    assert in_flight(plan, [1] * 4, 4, whole_backward=True) == [4, 3]


def test_theoretical_timeline() -> None:
    assert plan_timeline(_plan("1f1b", 4, 1), microbatches=8).bubble == pytest.approx(ideal_bubble(4, 8))
    uneven = plan_timeline(_plan("1f1b", 2, 1, costs=(0.75, 0.25)), microbatches=8)
    assert uneven.bubble > plan_timeline(_plan("1f1b", 2, 1, costs=(0.5, 0.5)), microbatches=8).bubble
    # The slow rank never waits for the other.
    assert uneven.duration == pytest.approx(3 * 8 * 0.75)
