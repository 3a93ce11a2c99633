"""Reductions and choices along a dim that is cut: equal to torch on the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.shards.along import amax, amin, argmax, argmin, largest, mean, pick, smallest, topk, total
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from tests.unit.shards.threads import compare, random, run_threads

SHAPE = (4, 8, 12)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
DIMS = pytest.mark.parametrize("dim", [0, 1, 2, -1])
KEEP = pytest.mark.parametrize("keepdim", [False, True])


def with_ties() -> Tensor:
    return torch.randint(0, 3, SHAPE, generator=torch.Generator().manual_seed(0)).double()


def on_ranks(ours: Callable[[Tensor, ShardGroup], Any], tensor: Tensor, dim: int, size: int) -> list[Any]:
    return run_threads(size, lambda group: ours(take(tensor, dim, (tensor.shape[dim],), group.rank, group.size), group))


@SIZES
@DIMS
@KEEP
@pytest.mark.parametrize(("ours", "theirs"), [(largest, torch.max), (smallest, torch.min)])
def test_extremes_and_where_they_are(size: int, dim: int, keepdim: bool, ours: Any, theirs: Any) -> None:
    for tensor in (random(*SHAPE), with_ties()):
        compare(
            lambda local, group: ours(local, group, dim, SHAPE[dim], keepdim).values,
            lambda one: theirs(one, dim, keepdim).values,
            tensor,
            dim=dim,
            size=size,
        )
        for result in on_ranks(lambda local, group: ours(local, group, dim, SHAPE[dim], keepdim), tensor, dim, size):
            assert type(result) is type(theirs(tensor, dim))
            assert torch.equal(result.indices, theirs(tensor, dim, keepdim).indices)


@SIZES
@DIMS
@KEEP
@pytest.mark.parametrize(("ours", "theirs"), [(argmax, torch.argmax), (argmin, torch.argmin)])
def test_where_the_first_extremes_are(size: int, dim: int, keepdim: bool, ours: Any, theirs: Any) -> None:
    ties = with_ties()
    for tensor in (random(*SHAPE), ties, ties.bfloat16(), ties.long()):
        for result in on_ranks(lambda local, group: ours(local, group, dim, SHAPE[dim], keepdim), tensor, dim, size):
            assert torch.equal(result, theirs(tensor, dim, keepdim))


def test_what_is_not_a_number_is_the_extreme() -> None:
    tensor = random(3, 8)
    tensor[0, 5] = math.nan
    tensor[1, 1] = tensor[1, 6] = math.nan
    tensor[2, 2] = -math.inf
    for ours, theirs in ((largest, torch.max), (smallest, torch.min)):
        expected = theirs(tensor, 1)
        for values, indices in on_ranks(lambda local, group, ours=ours: ours(local, group, 1, 8), tensor, 1, 2):
            torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(indices, expected.indices)
    for result in on_ranks(lambda local, group: amax(local, group, 1), tensor, 1, 2):
        torch.testing.assert_close(result, tensor.amax(1), rtol=0, atol=0, equal_nan=True)


def test_large_integers_are_exact() -> None:
    tensor = torch.tensor([[2**62, 2**62 + 1, -(2**62) - 1, -(2**62)]])
    for high, low in on_ranks(
        lambda local, group: (largest(local, group, 1, 4), smallest(local, group, 1, 4)), tensor, 1, 2
    ):
        assert (high.values.item(), high.indices.item()) == (2**62 + 1, 1)
        assert (low.values.item(), low.indices.item()) == (-(2**62) - 1, 2)


@SIZES
@pytest.mark.parametrize("dim", [(0,), (1,), (1, 2), (-1, 1), (0, 1, 2)], ids=str)
@KEEP
@pytest.mark.parametrize(("ours", "theirs"), [(amax, torch.amax), (amin, torch.amin)])
def test_equal_extremes_share_the_gradient(
    size: int, dim: tuple[int, ...], keepdim: bool, ours: Any, theirs: Any
) -> None:
    for tensor in (random(*SHAPE), with_ties()):
        compare(
            lambda local, group: ours(local, group, dim, keepdim),
            lambda one: theirs(one, dim, keepdim),
            tensor,
            dim=dim[-1],
            size=size,
        )


@SIZES
@pytest.mark.parametrize("k", [1, 2, 5, 12])
@pytest.mark.parametrize("most", [True, False])
def test_topk(size: int, k: int, most: bool) -> None:
    tensor = random(*SHAPE)
    compare(
        lambda local, group: topk(local, group, k, -1, 12, most).values,
        lambda one: torch.topk(one, k, -1, most).values,
        tensor,
        dim=2,
        size=size,
    )
    expected = torch.topk(tensor, k, -1, most)
    for result in on_ranks(lambda local, group: topk(local, group, k, -1, 12, most), tensor, 2, size):
        assert type(result) is type(expected)
        assert torch.equal(result.indices, expected.indices)
    for result in on_ranks(lambda local, group: topk(local, group, k, 2, 12, most, sorted=False), tensor, 2, size):
        assert torch.equal(result.values.sort(2).values, expected.values.sort(2).values)
        assert torch.equal(tensor.gather(2, result.indices), result.values)


def test_topk_of_ties_points_at_its_values() -> None:
    tensor = with_ties()
    for values, indices in on_ranks(lambda local, group: topk(local, group, 7, 2, 12), tensor, 2, 4):
        assert torch.equal(values, tensor.topk(7, 2).values)
        assert torch.equal(tensor.gather(2, indices), values)
        assert all(len(set(row.tolist())) == 7 for row in indices.view(-1, 7))


def test_more_than_there_are() -> None:
    with pytest.raises(RuntimeError, match="k out of range"):
        on_ranks(lambda local, group: topk(local, group, 9, 1, 8), random(2, 8), 1, 2)


@SIZES
@DIMS
def test_pick(size: int, dim: int) -> None:
    tensor = random(*SHAPE)
    shape = [3, 5, 7]
    index = torch.randint(0, SHAPE[dim], shape, generator=torch.Generator().manual_seed(1))
    compare(
        lambda local, group: pick(local, group, dim, index, SHAPE[dim]),
        lambda one: one.gather(dim, index),
        tensor,
        dim=dim,
        size=size,
    )


def test_infinite_values_of_others_are_not_picked() -> None:
    tensor = torch.tensor([[-math.inf, 1.0, math.nan, 2.0]])
    for result in on_ranks(lambda local, group: pick(local, group, 1, torch.tensor([[1, 3, 0]]), 4), tensor, 1, 2):
        assert result.tolist() == [[1.0, 2.0, -math.inf]]


@pytest.mark.parametrize("index", [8, -1])
def test_an_index_out_of_bounds_is_found(index: int) -> None:
    with pytest.raises(IndexError):
        on_ranks(lambda local, group: pick(local, group, 1, torch.tensor([[index]]), 8), random(2, 8), 1, 2)


def whole_mean(local: Tensor, group: ShardGroup, dim: int | tuple[int, ...], keepdim: bool) -> Tensor:
    count = math.prod(SHAPE[each] for each in ((dim,) if isinstance(dim, int) else dim))
    return mean(local, group, dim, count, keepdim)


@SIZES
@pytest.mark.parametrize("dim", [1, -2, (1,), (1, 2), (0, 1, 2)], ids=str)
@KEEP
@pytest.mark.parametrize(("ours", "theirs"), [(total, torch.sum), (whole_mean, torch.mean)])
def test_sums_and_means(size: int, dim: int | tuple[int, ...], keepdim: bool, ours: Any, theirs: Any) -> None:
    compare(
        lambda local, group: ours(local, group, dim, keepdim),
        lambda one: theirs(one, dim, keepdim),
        random(*SHAPE),
        dim=1,
        size=size,
    )


def test_sums_are_rounded_once() -> None:
    tensor = (random(200, 64) * 100).half()
    exact = tensor.double().sum(1)
    for result in on_ranks(lambda local, group: total(local, group, 1), tensor, 1, 4):
        assert torch.equal(result, exact.half())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float16])
@pytest.mark.parametrize("wanted", [None, torch.float64, torch.int32])
def test_dtypes_of_sums_are_those_of_torch(dtype: torch.dtype, wanted: torch.dtype | None) -> None:
    tensor = torch.tensor([[1, 0, 1, 1]]).to(dtype)
    for result in on_ranks(lambda local, group: total(local, group, 1, dtype=wanted), tensor, 1, 2):
        torch.testing.assert_close(result, tensor.sum(1, dtype=wanted), rtol=0, atol=0)
