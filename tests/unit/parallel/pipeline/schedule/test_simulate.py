from __future__ import annotations

import pytest

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES, SCHEDULES
from lightning_3d.parallel.pipeline.schedule.actions import SPLIT_SCHEDULES, runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.parallel.pipeline.schedule.timeline import Timeline
from tests.spmd.pipeline_nets import ideal_bubble


def _simulated(schedule: str, ranks: int, count: int, *, whole_backward: bool = False, send: float = 0.0) -> Timeline:
    return simulate(
        schedule,
        ranks=ranks,
        microbatches=runnable_microbatches(schedule, ranks=ranks, microbatches=count),
        stages_per_rank=1 if schedule in ONE_STAGE_SCHEDULES else 2,
        whole_backward=whole_backward,
        send=send,
    )


def test_four_stages_and_four_microbatches_wait_three_sevenths() -> None:
    assert ideal_bubble(4, 4) == 3 / 7
    assert _simulated("gpipe", 4, 4).bubble == pytest.approx(3 / 7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [4, 5, 8])
@pytest.mark.parametrize("schedule", ONE_STAGE_SCHEDULES)
def test_one_stage_for_each_rank_waits_as_the_formula_says(schedule: str, ranks: int, count: int) -> None:
    assert _simulated(schedule, ranks, count).bubble == pytest.approx(ideal_bubble(ranks, count))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ONE_STAGE_SCHEDULES])
def test_two_stages_for_each_rank_wait_less(schedule: str, times: int, ranks: int) -> None:
    count = times * ranks
    # A rank waits for p - 1 stages of half the size, forward and backward (Narayanan et al. 2021, section 2.2); with
    # halves of backwards for one of the three parts alone (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
    work = (3 if schedule in SPLIT_SCHEDULES else 1) * 2 * count
    assert _simulated(schedule, ranks, count).bubble == pytest.approx((ranks - 1) / (work + ranks - 1))


@pytest.mark.parametrize("count", [4, 9])
def test_micro_batches_in_flight(count: int) -> None:
    gpipe, ahead = _simulated("gpipe", 4, count), _simulated("1f1b", 4, count)
    assert [gpipe.in_flight(rank) for rank in range(4)] == [count] * 4
    assert [ahead.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("whole_backward", [False, True])
def test_no_rank_waits_for_ever(schedule: str, ranks: int, whole_backward: bool) -> None:
    for count in range(1, 10):
        timeline = _simulated(schedule, ranks, count, whole_backward=whole_backward, send=0.25)
        kinds = {event.action.kind for event in timeline.events}
        # The few micro-batches of a short DualPipeV are all in its middle, where backwards are whole.
        assert "W" in kinds if schedule in SPLIT_SCHEDULES and not whole_backward else kinds == {"F", "B"}


@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_whole_backwards_fill_less_of_the_bubble(schedule: str) -> None:
    assert _simulated(schedule, 4, 8).bubble < _simulated(schedule, 4, 8, whole_backward=True).bubble


def test_sends_and_slow_stages_delay_what_needs_them() -> None:
    slow = StageTimes(forward=3, backward_input=2, backward_weight=2)
    timeline = simulate("gpipe", ranks=2, microbatches=2, times=[StageTimes(), slow], send=0.5)
    found = [(event.rank, str(event.action), event.start, event.end) for event in timeline.events]
    assert found == [
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 12, 14),
        (0, "0B1", 16, 18),
        (1, "1F0", 1.5, 4.5),
        (1, "1F1", 4.5, 7.5),
        (1, "1B0", 7.5, 11.5),
        (1, "1B1", 11.5, 15.5),
    ]


def test_stages_of_one_rank_send_nothing() -> None:
    # Stages 1 and 2 lie on rank 1: 2F0 begins when 1F0 ends.
    events = {str(event.action): event for event in _simulated("zbvzerobubble", 2, 3, send=0.5).events}
    assert events["1F0"].start == 1.5
    assert events["2F0"].start == events["1F0"].end
