"""A certificate says equal only where enough was compared and all of it is equal."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_3d.verify.certificate import Certificate, Place, Setting
from lightning_3d.verify.comparison import Check, Difference

_SETTING = Setting(
    module="Net",
    shrunk=("blocks: the first 2 of 4 Block",),
    parameters=1200,
    mesh="data 2 x pipeline 1 x tensor 1 = 2 ranks",
    options={"zero_stage": 1},
    microbatches=(1, 2),
    steps=(3, 2),
    precision="64-true",
    trainer={},
    seed=0,
)
_KINDS = ("initial weights", "loss", "gradients", "gradient norm", "parameters", "on all ranks")


def check(kind: str, error: float = 0.0) -> Check:
    return Check(kind=kind, bound=1e-10, differences=(Difference(error=error, name="w", step=1),))


def certificate(*checks: Check, **changes: object) -> Certificate:
    return replace(Certificate(setting=_SETTING, checks=checks), **changes)  # type: ignore[arg-type]


def test_equal() -> None:
    found = certificate(*map(check, _KINDS), not_compared=("validation",), plan="abc")
    assert found.equal
    text = str(found)
    assert text.startswith("EQUAL in all that was compared: Net on data 2 ")
    for words in (
        "not compared:\n  validation",
        "3 optimizer steps of 2 batches",
        "1.2k parameters",
        "plan",
        "w, step 1",
    ):
        assert words in text


@pytest.mark.parametrize("missing", _KINDS)
def test_without_what_is_needed_nothing_is_shown(missing: str) -> None:
    found = certificate(
        *(check(kind) for kind in _KINDS if kind != missing), Check(kind=missing, bound=0, reason="why")
    )
    assert not found.equal
    assert str(found).startswith("NOT SHOWN")
    assert f"not compared:\n  {missing}: why" in str(found)


def test_logged_values_can_stand_for_the_loss() -> None:
    kinds = (*(kind for kind in _KINDS if kind != "loss"), "logged values")
    assert certificate(*map(check, kinds)).equal


@pytest.mark.parametrize("error", [1e-9, math.inf, math.nan])
def test_one_difference_is_enough(error: float) -> None:
    found = certificate(*map(check, _KINDS), check("other state", error))
    assert not found.equal
    assert str(found).startswith("NOT EQUAL: Net on data 2 ")
    assert "1 of 1 differ" in str(found)


def test_a_module_that_does_not_repeat_is_not_equal_whatever_was_compared() -> None:
    place = Place(axes=None, facts=("'noise' is the first",), advice=("seed it",))
    found = certificate(*map(check, _KINDS), repeats="loss, step 0", place=place)
    assert not found.equal
    assert "is not deterministic on one device" in str(found)
    assert "where it comes from: one device\n  'noise' is the first\nwhat to try:\n  seed it" in str(found)


def test_a_module_that_cannot_run_on_the_mesh_has_failed() -> None:
    found = certificate(place=Place(axes=("tensor",), facts=("rank 1 of 2 failed",)))
    assert not found.equal
    assert str(found).startswith("FAILED: Net runs on one device, but not on data 2 ")


def test_json_stands_beside_the_text(tmp_path: Path) -> None:
    found = certificate(*map(check, _KINDS), check("other state", math.inf), place=Place(axes=("data", "tensor")))
    text, data = found.write(tmp_path / "new")
    assert text.read_text() == f"{found}\n"
    read = json.loads(data.read_text())
    assert read["equal"] is False
    assert read["checks"][-1]["largest_error"] == "inf"
    assert read["place"]["axes"] == ["data", "tensor"]
    assert read["setting"]["microbatches"] == [1, 2]
