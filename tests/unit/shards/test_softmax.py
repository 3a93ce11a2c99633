"""Softmax over a dim that is cut: equal to torch on the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.shards.layout import take
from lightning_3d.shards.softmax import log_softmax, logsumexp, softmax
from tests.unit.shards.threads import ThreadShardGroup, compare, leaf, random, run_threads, whole

SHAPE = (4, 8, 12)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize(("ours", "theirs"), [(softmax, torch.softmax), (log_softmax, torch.log_softmax)])
def test_parts_of_the_whole(size: int, dim: int, ours: Any, theirs: Any) -> None:
    compare(
        lambda local, group: ours(local, group, dim),
        lambda one: theirs(one, dim),
        random(*SHAPE) * 5,
        dim=dim,
        size=size,
        sharded=True,
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp(size: int, dim: int, keepdim: bool) -> None:
    compare(
        lambda local, group: logsumexp(local, group, dim, keepdim),
        lambda one: torch.logsumexp(one, dim, keepdim),
        random(*SHAPE) * 5,
        dim=dim,
        size=size,
    )


def test_infinite_values() -> None:
    values = random(4, 8)
    values[0, :4] = -math.inf
    values[1] = -math.inf
    values[2, 5] = math.inf
    values[3, 5] = math.nan
    for ours, theirs in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        compare(
            lambda local, group, ours=ours: ours(local, group, 1),
            lambda one, theirs=theirs: theirs(one, 1),
            values,
            dim=1,
            size=2,
            sharded=True,
        )
    compare(lambda local, group: logsumexp(local, group, 1), lambda one: one.logsumexp(1), values, dim=1, size=2)


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_large_values_keep_their_digits(offset: float) -> None:
    values = (random(4, 8) + offset).float()
    for ours, theirs in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        compare(
            lambda local, group, ours=ours: ours(local, group, 1),
            lambda one, theirs=theirs: theirs(one, 1),
            values,
            dim=1,
            size=2,
            sharded=True,
            tolerance=1e-6,
        )


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(("ours", "theirs"), [(softmax, torch.softmax), (log_softmax, torch.log_softmax)])
def test_half_precision_is_rounded_once(ours: Any, theirs: Any, dtype: torch.dtype | None) -> None:
    values = random(6, 32, dtype=torch.bfloat16)
    seed = random(6, 32, dtype=torch.bfloat16).roll(1, 1)
    one = values.double().requires_grad_()
    expected = theirs(one, 1)
    expected.backward(seed.double())
    assert one.grad is not None

    def fn(group: ThreadShardGroup) -> tuple[Tensor, Tensor]:
        local = leaf(values, 1, group)
        result = ours(local, group, 1, dtype)
        result.backward(take(seed, 1, (32,), group.rank, group.size).to(result.dtype))
        assert local.grad is not None
        return result.detach(), local.grad

    results, gradients = (whole(parts, 1) for parts in zip(*run_threads(2, fn), strict=True))
    assert (results.dtype, gradients.dtype) == (theirs(values, 1, dtype=dtype).dtype, torch.bfloat16)
    half = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(results.double(), expected.detach(), rtol=half if dtype is None else 0, atol=1e-6)
    # Made of the rounded result, as in torch: p is off by p |log p| half at most, times a sum of gradients.
    torch.testing.assert_close(gradients.double(), one.grad, rtol=2 * half, atol=2 * half)
