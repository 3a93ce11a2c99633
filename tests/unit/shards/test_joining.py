"""Tensors and copies of them put together, positions exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.shards.operations import check, operand

Function = Callable[..., Any]


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.concatenate, torch.stack])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_and_replicated_tensors(join: Function, dim: int) -> None:
    x, y = operand(2, 4, 6, cut=1), operand(2, 4, 6, seed=1)
    check(lambda x, y: join((x, y, x), dim), x, y, size=2)
    check(lambda x, y: join([y, x], dim=dim), x, y, size=2)


def test_along_the_cut_dim_each_brings_its_segments() -> None:
    x, y = operand(2, 8, cut=1, segments=(2, 6)), operand(2, 4, cut=1, seed=1)
    z = operand(2, 6, seed=2)
    (result,) = check(lambda x, y, z: torch.cat((x, y, z), 1), x, y, z, size=2)
    assert result._segments == (2, 6, 4, 6)
    check(lambda x, y: torch.cat((x, y), 1), x, operand(2, 3), size=2, on_shards=False)


def test_what_is_cut_differently_gathers() -> None:
    x = operand(2, 8, cut=1)
    check(lambda x, y: torch.cat((x, y)), x, operand(2, 8, cut=1, segments=(4, 4)), size=2, on_shards=False)
    check(lambda x, y: torch.stack((x, y)), x, operand(2, 8, cut=0), size=2, on_shards=False)


@pytest.mark.parametrize("cut", [0, 1])
def test_empty_tensors_of_one_dim_are_skipped(cut: int) -> None:
    check(lambda x: torch.cat((torch.zeros(0, dtype=x.dtype), x, x), 1), operand(2, 4, cut=cut), size=2)


FUNCTIONS: dict[str, Function] = {
    "repeat_interleave": lambda x: x.repeat_interleave(3, 2),
    "repeat_interleave torch": lambda x: torch.repeat_interleave(x, 2, dim=-1),
    "repeat_interleave of one dim": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 1, output_size=3),
    "flip": lambda x: x.flip(1),
    "flip of two": lambda x: torch.flip(x, (0, 3)),
    "roll": lambda x: x.roll(2, 1),
    "roll of two": lambda x: torch.roll(x, shifts=(1, -1), dims=(0, 3)),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad around": lambda x: F.pad(x, (1, -1, 0, 0, 2, 0), value=0.5),
    "pad with copies": lambda x: F.pad(x, (1, 1, 0, 0), mode="replicate"),
    "glu": lambda x: F.glu(x[..., :2]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_shards(name: str) -> None:
    check(FUNCTIONS[name], operand(2, 3, 8, 3, cut=2), size=2)
    check(FUNCTIONS[name], operand(2, 3, 8, 3, cut=2, segments=(2, 4, 2)), size=2)


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_anywhere(name: str, cut: int) -> None:
    # Three ranks, as torch.tensor([1, 0, 2]) repeats three positions.
    check(FUNCTIONS[name], operand(3, 3, 8, 3, cut=cut), size=3, on_shards=None)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x.roll(1, 0),
        lambda x: x.repeat_interleave(torch.arange(4), 0),
        lambda x: x.repeat_interleave(2),
        lambda x: F.pad(x, (0, 0, 1, 0)),
        lambda x: x.tril(),
    ],
)
def test_the_cut_dim_itself_gathers(function: Function) -> None:
    check(function, operand(4, 6, cut=0), size=2, on_shards=False)


@pytest.mark.parametrize("function", [torch.tril, torch.triu])
def test_triangles(function: Function) -> None:
    check(lambda x: function(x, 1), operand(4, 3, 5, cut=0), size=2)
    check(lambda x: function(x), operand(3, 4, 5, cut=1), size=2, on_shards=False)


def test_halves_of_the_cut_dim() -> None:
    check(lambda x: F.glu(x, 1), operand(3, 8, cut=1, segments=(4, 4)), size=2)
    check(lambda x: F.glu(x, 1), operand(3, 8, cut=1), size=2, on_shards=False)
