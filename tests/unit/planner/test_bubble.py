"""Closed forms against torch's own action lists, played, and against published bubbles."""

import pytest

from lightning_3d.errors import ConfigError, MeshError
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.planner import BatchShape, DecoderShape, MeshShape, predict
from lightning_3d.planner.bubble import checked_schedule, idle_time, in_flight
from tests.unit.planner.tables import A100, MEGATRON, MEGATRON_ORDER, gpt, lines

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


def test_the_bubbles_of_the_articles() -> None:
    for ranks, count, expected in ((4, 4, 3 / 7), (4, 24, 3 / 27)):
        idle = idle_time("1f1b", ranks=ranks, microbatches=count, forward=1.0, backward_input=1.0, backward_weight=1.0)
        assert idle / (idle + 3 * count) == pytest.approx(expected, abs=1e-12)
    shape = DecoderShape(96, 12288, 96, 96, 49152, 51200, 2048)
    mesh = MeshShape(data_parallel_size=16, pipeline_parallel_size=4, tensor_parallel_size=8)
    batch = BatchShape(global_size=1536, micro_size=4)
    assert predict(shape, mesh, batch, "a100_x8").bubble_fraction == pytest.approx(3 / 27, abs=0.005)


# Zero Bubble, table 4: layers, heads, hidden size; table 5 and 8: samples of a micro-batch.
_MODELS = {"1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096), "14.6B": (46, 40, 5120), "28.3B": (62, 48, 6144)}


def _with_waits(line: dict[str, str]) -> float:
    """The bubble as Qi et al. count it: all but computation, sends included."""
    ranks, count = int(line["pp"]), int(line["microbatches"])
    layers, heads, hidden = _MODELS[line["model"]]
    interleaved = line["schedule"] == "1F1B-I"
    layers += 2
    stages = layers // ranks if interleaved else 1
    mesh = MeshShape(
        data_parallel_size=1,
        pipeline_parallel_size=ranks,
        stages_per_rank=stages,
        rank_order=MEGATRON_ORDER,
        layers_per_stage=(layers // ranks // stages,) * (ranks * stages),
    )
    micro = {"1.5B": 6, "6.2B": 3}.get(line["model"], 1)
    found = predict(
        gpt(layers, hidden, heads, vocab=512, sequence=1024),
        mesh,
        BatchShape(global_size=count * micro, micro_size=micro),
        A100,
        software=MEGATRON,
    )
    busy = found.time.compute
    return 1 - busy / (busy + found.time.bubble + found.time.pipeline)


def test_published_bubbles_within_two_points() -> None:
    errors = [
        _with_waits(line) - float(line["bubble_rate"])
        for line in lines("zero_bubble_bubble_rates")
        if line["schedule"] in ("1F1B", "1F1B-I")
    ]
    sizes = [abs(error) for error in errors]
    assert sum(sizes) / len(sizes) < 0.015
    assert max(sizes) < 0.03


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
