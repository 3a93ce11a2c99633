"""Norms over dims that are whole; over the dim that is cut they gather."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random

SIZES = (2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
def test_layer_norm(size: int) -> None:
    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        return F.layer_norm(x, (5, 4), *parameters, eps=1e-3)

    parameters = [random(5, 4), random(5, 4, seed=1)]
    ran = agree(norm, [random(2, 12, 5, 4), *parameters], {0: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((Layout(1, (12,)),), {}, {"sum": 2})
    assert agree(norm, [random(2, 12, 5, 4)], {0: 1}, size).backward == {}
    assert agree(norm, [random(2, 12, 5, 4), parameters[0]], {0: 1}, size).backward == {"sum": 1}


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int) -> None:
    def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, (4,), weight, 1e-3)

    ran = agree(norm, [random(2, 12, 4), random(4)], {0: Cut(dim=1, segments=(12,))}, size)
    assert (ran.cuts, ran.backward) == ((Layout(1, (12,)),), {"sum": 1})
    assert agree(norm, [random(2, 12, 4)], {0: 1}, size).backward == {}


@pytest.mark.parametrize("size", SIZES)
def test_group_norm(size: int) -> None:
    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        return F.group_norm(x, 12, *parameters)

    parameters = [random(24), random(24, seed=1)]
    assert agree(norm, [random(12, 24, 3), *parameters], {0: 0}, size).backward == {"sum": 2}
    ran = agree(norm, [random(2, 24, 3), *parameters], {0: 1}, size)
    assert (ran.cuts, ran.backward) == ((Layout(1, (24,)),), {"gather": 2})
    assert agree(norm, [random(2, 24), *parameters], {0: 1}, size).backward == {"gather": 2}


@pytest.mark.parametrize("size", SIZES)
def test_normalize(size: int) -> None:
    assert agree(lambda x: F.normalize(x, dim=-1), [random(2, 12, 4)], {0: 1}, size).cuts == (Layout(1, (12,)),)


def test_over_the_cut_dim_they_gather() -> None:
    agree(lambda x, w: F.layer_norm(x, (4,), w), [random(3, 4), random(4)], {0: 1}, 2, gathers=["layer_norm"])
    agree(lambda x: F.rms_norm(x, (3, 4)), [random(2, 3, 4)], {0: 2}, 2, gathers=["rms_norm"])
    agree(lambda x, w: F.layer_norm(x, (4,), w), [random(3, 4), random(4)], {1: 0}, 2, gathers=["layer_norm"])
    agree(lambda x: F.group_norm(x, 3), [random(2, 6, 4)], {0: 1}, 2, gathers=["group_norm"])
    agree(lambda x: F.group_norm(x, 2), [random(2, 6, 4)], {0: 2}, 2, gathers=["group_norm"])
    agree(F.normalize, [random(2, 4)], {0: 1}, 2, gathers=["normalize"])
