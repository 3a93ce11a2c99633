from __future__ import annotations

from pathlib import Path

import pytest

from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.pipeline.report import PipelineReport
from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.timeline import Event, Timeline
from tests.unit.parallel.pipeline.planned import Small, TiedHead, plan, states

MEASURED = Timeline(
    2,
    (
        Event(0, Action(0, "F", 0), 10.0, 11.0),
        Event(0, Action(0, "B", 0), 15.0, 17.0),
        Event(1, Action(1, "F", 0), 11.5, 12.5),
        Event(1, Action(1, "B", 0), 12.5, 14.5),
    ),
)


def _report(microbatches: int = 3, batches: int = 1, whole_backward: bool = False, **options: object) -> PipelineReport:
    module = Small(TiedHead())
    return PipelineReport(
        plan=plan(module, states(), **options),
        parameters=parameter_table(module),
        microbatches=microbatches,
        batches=batches,
        whole_backward=whole_backward,
    )


def test_text() -> None:
    # Weights and biases of 8 x 8 + 8 elements; the head is the weight of the first layer.
    assert str(_report()).splitlines() == [
        "what each pipeline rank holds, before the other axes divide it, and sends in an optimizer step",
        "  rank 0 with stage 0: 6 parameters of 216 elements, 864 B; sends 576 B, keeps 576 B to receive in",
        "  rank 1 with stage 1: 5 parameters of 208 elements, 832 B; sends 576 B, keeps 576 B to receive in",
        "what each micro-batch sends",
        "  stage 0 -> stage 1: rank 0 -> rank 1, 192 B forward, 192 B backward",
        "1f1b, micro-batches 3, by counted cost: bubble 25.0%, micro-batches in flight 2 1",
        "  rank 0  F0 F1 ......B0--- F2 B1--- ...B2---",
        "  rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......",
    ]


def test_accumulated_batches_are_sent_one_by_one() -> None:
    assert "sends 1.12 KiB, keeps 576 B" in str(_report(batches=2))


def test_empty_micro_batches_are_told() -> None:
    assert "1f1b, micro-batches 1 and 1 empty ones, which it needs, by counted" in str(_report(microbatches=1))


def test_halves_of_backwards_are_shown_where_they_run() -> None:
    split = str(_report(pipeline_schedule="zbvzerobubble"))
    whole = str(_report(pipeline_schedule="zbvzerobubble", whole_backward=True))
    assert "0W1" in split
    assert "0W1" not in whole
    assert "0B1--" in whole
    assert "stage 1 -> stage 2: rank 1 -> rank 1, not sent" in split


def test_long_schedules_are_cut() -> None:
    lines = str(_report(microbatches=64)).splitlines()
    assert lines[-1].endswith(" ...")
    assert max(map(len, lines)) < 160


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_measured_step_stands_beside_the_theoretical_one(microbatches: int, tmp_path: Path) -> None:
    times = _report(microbatches).timelines(MEASURED)
    # A step on a bubble of one of two: 1f1b has no more micro-batches than were seen, and an empty one.
    assert len(times.theoretical.events) == 2 * 2 * 2
    lines = times.text(width=14).splitlines()
    assert lines[:3] == [
        "measured, 7.0 s: bubble 57.1%, micro-batches in flight 1 1",
        "rank 0  F0........B0-",
        "rank 1  ...F0B0- .....",
    ]
    assert lines[3].startswith("theoretical: bubble 33.3%")


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    _report().timelines(MEASURED).save_png(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
