"""Errors are relative to what counts, and what is missing, not finite or not there is never called equal."""

import math

import pytest
import torch

from lightning_3d.verify.comparison import (
    FP32,
    FP64,
    KINDS,
    Check,
    compare,
    error,
    norms,
    not_finite,
    number_error,
    reduced,
    same_everywhere,
    unlike,
)
from lightning_3d.verify.record import Record


def record(scale: float = 1.0, **changes: object) -> Record:
    """Two steps of a module with a weight, a bias whose gradient is zero but for rounding, and a buffer."""
    weight, bias = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    found = Record(
        losses=[1.0, 0.5],
        logged=[{"a": 1.0}, {"a": 2.0}],
        gradients=[{"w": weight * scale, "b": bias + 1e-17}, {"w": weight, "b": bias}],
        start={"w": weight, "b": bias, "mean": torch.ones(1)},
        end={"w": weight + 1.0, "b": bias, "mean": torch.ones(1)},
        parameters=["w", "b"],
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def checks(found: Record, expected: Record | None = None) -> dict[str, Check]:
    return {check.kind: check for check in compare(found, expected or record(), FP64)}


def test_a_run_is_equal_to_itself_in_every_kind() -> None:
    found = checks(record())
    assert tuple(found) == KINDS
    assert all(check.equal for check in found.values())
    assert found["gradients"].compared == 4
    assert found["logged values"].compared == 2


def test_a_gradient_that_is_off_is_named_with_its_step() -> None:
    found = checks(record(1 + 1e-6))
    (wrong,) = found["gradients"].wrong
    assert (wrong.name, wrong.step, wrong.place) == ("w", 0, "w, step 0")
    assert wrong.error == pytest.approx(1e-6, rel=1e-3)
    assert not found["gradient norm"].equal
    assert found["parameters"].equal


def test_rounding_of_a_zero_gradient_does_not_count_but_a_wrong_one_does() -> None:
    small = record()
    small.gradients[0]["b"] = torch.tensor([3e-16, 0.0], dtype=torch.float64)
    assert checks(small)["gradients"].equal
    small.gradients[0]["b"] = torch.tensor([1e-9, 0.0], dtype=torch.float64)
    assert [each.name for each in checks(small)["gradients"].wrong] == ["b"]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"losses": [1.0]}, "loss"),
        ({"losses": [1.0, math.nan]}, "loss"),
        ({"logged": [{"a": 1.0}, {"a": 2.0, "b": 1.0}]}, "logged values"),
        ({"logged": [{"a": 1.0}, {}]}, "logged values"),
        ({"gradients": [{"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}]}, "gradients"),
        ({"end": {"w": torch.tensor([2.0, 3.0])}}, "other state"),
        (
            {"start": {"w": torch.tensor([1.0, 2.0 + 1e-6]), "b": torch.zeros(2), "mean": torch.ones(1)}},
            "initial weights",
        ),
        ({"end": {"w": torch.ones(3), "b": torch.zeros(2), "mean": torch.ones(1)}}, "parameters"),
    ],
)
def test_what_is_missing_or_no_number_is_not_equal(changes: dict[str, object], kind: str) -> None:
    found = checks(record(**changes))[kind]
    assert found.compared
    assert not found.equal


def test_what_is_not_there_is_not_compared_and_has_a_reason() -> None:
    bare = record(losses=[], logged=[], gradients=[])
    for kind in ("loss", "logged values", "gradients", "gradient norm"):
        check = checks(bare, bare)[kind]
        assert (check.compared, check.equal) == (0, False)
        assert check.reason


def test_zero_gradients_and_steps_that_change_nothing_show_nothing() -> None:
    zeros = {"w": torch.zeros(2), "b": torch.zeros(2)}
    idle = record(gradients=[zeros, zeros], end=record().start)
    found = checks(idle, idle)
    assert found["gradients"].reason == "every gradient is zero on one device"
    assert found["parameters"].reason == "the steps changed no parameter on one device"


def test_buffers_that_are_not_meant_to_be_equal_are_left_out() -> None:
    other = record(end={**record().end, "mean": torch.zeros(1)})
    assert not checks(other)["other state"].equal
    left = compare(other, record(), FP64, unlike_buffers=["mean"])[-1]
    assert (left.kind, left.compared) == ("other state", 0)


def test_errors() -> None:
    one, two = torch.ones(2), torch.tensor([1.0, 1.5])
    assert error(two, one) == 0.5
    assert error(torch.ones(3), one) == math.inf
    assert error(torch.full((2,), math.nan), one) == math.inf
    infinite = torch.full((2,), -math.inf)
    assert error(one, infinite) == error(infinite, one) == math.inf
    assert error(infinite, infinite) == 0
    assert error(torch.zeros(0), torch.zeros(0)) == 0
    assert error(torch.tensor([1j]), torch.tensor([1.5j])) == pytest.approx(1 / 3)
    assert number_error(0.0, 0.0) == 0
    assert number_error(math.nan, math.nan) == math.inf


def test_bounds_of_a_reduced_precision_are_three_times_its_own_distance() -> None:
    own = compare(record(1.01), record(), FP64)
    bounds = reduced("bf16-true", own, least_scalar=1e-3)
    assert bounds.gradient == pytest.approx(0.03)
    assert bounds.scalar == pytest.approx(3 * number_error(norms(record(1.01))[0], norms(record())[0]))
    assert reduced("bf16-true", own, least_scalar=0.5).scalar == 0.5
    assert (FP32.of("gradients"), FP32.of("loss"), FP32.of("initial weights")) == (1e-4, 1e-5, 0.0)


def test_bits_and_finite_numbers() -> None:
    assert unlike(record(), record()) == ""
    assert unlike(record(1 + 1e-15), record()).startswith("gradients: w, step 0 by ")
    assert not_finite(record()) == ""
    assert not_finite(record(losses=[1.0, math.inf])) == "the loss of step 1 is inf"


def test_all_ranks_have_to_end_alike() -> None:
    digests = [record().digest(), record().digest(), record(1 + 1e-15).digest()]
    assert same_everywhere(digests[:2]).equal
    assert [each.name for each in same_everywhere(digests).wrong] == ["rank 2"]
