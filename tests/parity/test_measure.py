"""What is no number makes a row fail, wherever it stands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.parity.measure import FP32, Record, compare


def record() -> Record:
    weights = {name: torch.ones(2, dtype=torch.float64) for name in "ab"}
    return Record(
        losses=[1.0, 1.0],
        gradients=[dict(weights)],
        norms=[2.0, 2.0],
        parameters=dict(weights),
        start={name: value * 2 for name, value in weights.items()},
        logged={"a": 1.0, "b": 1.0},
    )


def in_a_loss(found: Record) -> None:
    found.losses[1] = math.nan


def in_a_norm(found: Record) -> None:
    found.norms[1] = math.nan


def in_a_logged_value(found: Record) -> None:
    found.logged["b"] = math.nan


def in_a_gradient(found: Record) -> None:
    found.gradients[0]["b"] = torch.tensor([1.0, math.nan], dtype=torch.float64)


def in_a_parameter(found: Record) -> None:
    found.parameters["b"] = torch.tensor([1.0, math.nan], dtype=torch.float64)


@pytest.mark.parametrize("put", [in_a_loss, in_a_norm, in_a_logged_value, in_a_gradient, in_a_parameter])
def test_what_is_no_number_is_not_within_bounds(put: Callable[[Record], None]) -> None:
    found = record()
    assert compare(found, record()).within(FP32)
    put(found)
    assert not compare(found, record()).within(FP32)
