"""Runs that fail, without processes: what they leave, and where they fail."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.errors import MeshError, RunError
from lightning_3d.verify.processes import Crew
from lightning_3d.verify.runs import Request, Runs
from lightning_3d.verify.search import place_of_failure
from lightning_3d.verify.subject import ConfiguredSubject

REQUEST = Request(
    subject=ConfiguredSubject({}, 0),
    layers=None,
    options={"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    world=8,
    steps=1,
    trainer={},
    seed=0,
    seconds=1.0,
)


def test_batches_that_cannot_be_taken_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def fails(self: Crew, *_: Any) -> None:
        seen.extend(tmp_path.iterdir())
        raise RunError("no batches")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Crew, "run", fails)
    runs = Runs(REQUEST)
    with pytest.raises(RunError, match="no batches"), runs:
        pass
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_smaller_mesh_that_is_refused_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[tuple[str, ...], Exception] = {
        ("data",): MeshError("too few samples"),
        ("tensor",): RunError("no such operation"),
    }

    def on(self: Runs, axes: tuple[str, ...], precision: str) -> None:
        if axes in answers:
            raise answers[axes]

    monkeypatch.setattr(Runs, "on", on)
    place = place_of_failure(Runs(REQUEST), "64-true", RunError("no such operation"))
    assert place.axes == ("tensor",)
    assert place.facts == (
        "data 2 alone cannot run",
        "pipeline 2 alone runs",
        "tensor 2 alone fails",
        "no such operation",
    )
