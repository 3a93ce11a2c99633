from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.simulate import simulate
from lightning_3d.parallel.pipeline.schedule.timeline import Event, Timeline

MEASURED = Timeline(
    2,
    (
        Event(0, Action(0, "F", 0), 10.0, 11.0),
        Event(0, Action(0, "B", 0), 15.0, 17.0),
        Event(1, Action(1, "F", 0), 11.5, 12.5),
        Event(1, Action(1, "B", 0), 12.5, 14.5),
    ),
)


def test_a_table_has_a_column_for_each_moment() -> None:
    assert simulate("1f1b", ranks=2, microbatches=2).table().splitlines() == [
        "bubble 33.3%, micro-batches in flight 2 1",
        "rank 0  F0 F1 ......B0--- ...B1---",
        "rank 1  ...F0 B0--- F1 B1--- ......",
    ]


def test_several_stages_of_a_rank_are_told_apart() -> None:
    lines = simulate("zbvzerobubble", ranks=2, microbatches=1, stages_per_rank=2).table().splitlines()
    assert lines[1:] == [
        "rank 0  0F0 ........3F0 3I0 3W0 ........0I0 0W0",
        "rank 1  ....1F0 2F0 ........2I0 2W0 1I0 1W0 ....",
    ]


def test_text_has_the_width_that_it_is_given() -> None:
    lines = MEASURED.text(width=14).splitlines()
    assert lines == [
        "bubble 57.1%, micro-batches in flight 1 1",
        "rank 0  F0........B0-",
        "rank 1  ...F0B0- .....",
    ]


def test_times_are_counted_from_the_first_computation() -> None:
    assert (MEASURED.start, MEASURED.duration) == (10.0, 7.0)
    assert MEASURED.bubble == pytest.approx(1 - 6 / 14)


def test_what_weights_need_is_held_until_their_backward() -> None:
    kinds = ("F", "F", "I", "F", "W", "I", "W", "B")
    counts = (0, 1, 0, 2, 0, 1, 1, 2)
    events = tuple(
        Event(0, Action(0, kind, count), index, index + 1)  # type: ignore[arg-type]
        for index, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    )
    assert Timeline(1, events).in_flight(0) == 3
    whole = tuple(event for event in events if event.action.kind != "W")
    assert Timeline(1, whole).in_flight(0) == 2


def test_in_flight_counts_bytes() -> None:
    timeline = simulate("loopedbfs", ranks=2, microbatches=3, stages_per_rank=2)
    assert timeline.in_flight(0, [10, 1, 20, 2]) == 90
    assert timeline.in_flight(1, [10, 1, 20, 2]) == 9


def test_an_empty_timeline_is_text_too() -> None:
    assert Timeline(1, ()).table() == "bubble 0.0%, micro-batches in flight 0\nrank 0  "


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    MEASURED.save_png(tmp_path / "timeline.png", title="1f1b")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        MEASURED.save_png(tmp_path / "timeline.png")
    assert "lightning-3d[plot]" in str(caught.value)
