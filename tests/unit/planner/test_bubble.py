"""Closed forms against torch's own action lists, played, and against published bubbles."""

import pytest

from lightning_3d.errors import ConfigError, MeshError
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.planner import BatchShape, DecoderShape, MeshShape, predict
from lightning_3d.planner.bubble import checked_schedule, idle_time, in_flight, interleaved_sends
from tests.unit.planner.bubbles import bubbles, waiting

CASES = [
    (schedule, ranks, stages)
    for ranks in (2, 3, 4, 8)
    for schedule, stages in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("loopedbfs", 2),
        ("interleaved1f1b", 2),
        ("interleaved1f1b", 3),
        ("interleavedzerobubble", 2),
        ("zbvzerobubble", 2),
        ("dualpipev", 2),
    )
]


@pytest.mark.parametrize(("schedule", "ranks", "stages"), CASES)
def test_closed_forms_are_what_torchs_schedules_do(schedule: str, ranks: int, stages: int) -> None:
    times = StageTimes(forward=1.0, backward_input=1.0, backward_weight=1.0)
    for wanted in (ranks, ranks + 1, 2 * ranks, 4 * ranks, 5 * ranks + 1):
        count = runnable_microbatches(schedule, ranks=ranks, microbatches=wanted)
        played = simulate(
            schedule, ranks=ranks, microbatches=count, stages_per_rank=stages, times=(times,) * (ranks * stages)
        )
        idle = idle_time(
            schedule,
            ranks=ranks,
            microbatches=count,
            stages_per_rank=stages,
            forward=times.forward,
            backward_input=times.backward_input,
            backward_weight=times.backward_weight,
        )
        assert idle == pytest.approx(played.duration - 3.0 * stages * count, abs=1e-9)
        assert idle / (idle + 3 * stages * count) == pytest.approx(played.bubble, abs=1e-9)
        for rank in range(ranks):
            held = in_flight(schedule, ranks=ranks, rank=rank, microbatches=count, stages_per_rank=stages)
            assert held == played.in_flight(rank)


@pytest.mark.parametrize(("ranks", "stages"), [(4, 1), (8, 1), (4, 2), (8, 3), (8, 2)])
@pytest.mark.parametrize("link", [0.01, 0.05, 0.3, 1.0])
def test_sends_add_what_torchs_schedules_wait_for_them(ranks: int, stages: int, link: float) -> None:
    """A micro-batch takes a rank one second; a send takes a part of that, and the rank computes on."""
    schedule, count = "1f1b" if stages == 1 else "interleaved1f1b", 8 * ranks
    third = 1 / stages / 3
    times = StageTimes(forward=third, backward_input=third, backward_weight=third)
    stage_times = (times,) * (ranks * stages)

    def duration(send: float) -> float:
        return simulate(
            schedule, ranks=ranks, microbatches=count, stages_per_rank=stages, times=stage_times, send=send
        ).duration

    waits = duration(link) - duration(0.0)
    if stages == 1:
        # As Speed.send has it, and p - 1 times more in the bubble.
        assert 2 * (ranks - 1) / ranks * (count + ranks - 1) * link == pytest.approx(waits, rel=0.02)
    else:
        found = interleaved_sends(link, ranks=ranks, stages=stages, microbatches=count, seconds=1.0)
        assert found == pytest.approx(waits, abs=1e-9 if link < 0.1 else 0.08 * waits)


def test_the_bubbles_of_the_articles() -> None:
    for ranks, count, expected in ((4, 4, 3 / 7), (4, 24, 3 / 27)):
        idle = idle_time("1f1b", ranks=ranks, microbatches=count, forward=1.0, backward_input=1.0, backward_weight=1.0)
        assert idle / (idle + 3 * count) == pytest.approx(expected, abs=1e-12)
    shape = DecoderShape(96, 12288, 96, 96, 49152, 51200, 2048)
    mesh = MeshShape(data_parallel_size=16, pipeline_parallel_size=4, tensor_parallel_size=8)
    batch = BatchShape(global_size=1536, micro_size=4)
    assert predict(shape, mesh, batch, "a100_x8").bubble_fraction == pytest.approx(3 / 27, abs=0.005)


def test_published_bubbles_within_two_points() -> None:
    sizes = [abs(waiting(row.predict()) - rate) for row, rate in bubbles()]
    assert len(sizes) == 18
    assert sum(sizes) / len(sizes) < 0.005
    assert max(sizes) < 0.02


def test_schedules_are_ordered_as_published() -> None:
    def idle(schedule: str, stages: int) -> float:
        share = 1.0 / stages
        return idle_time(
            schedule,
            ranks=8,
            microbatches=24,
            stages_per_rank=stages,
            forward=share,
            backward_input=share,
            backward_weight=share,
        )

    assert idle("1f1b", 1) > idle("interleaved1f1b", 2) > idle("interleavedzerobubble", 2) >= idle("zbvzerobubble", 2)


def test_impossible_schedules() -> None:
    with pytest.raises(ConfigError, match="no pipeline_schedule '1f1d'"):
        checked_schedule("1f1d", 1)
    with pytest.raises(MeshError, match="gpipe runs one stage on a rank, not 2"):
        checked_schedule("gpipe", 2)
    with pytest.raises(MeshError, match="two stages"):
        checked_schedule("zbvzerobubble", 3)
    assert checked_schedule("1f1b", 2) == "interleaved1f1b"
