"""Reductions, softmax and choices over dims that are whole, and over the one that is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random

SIZES = (2, 3, 4)
X = random(3, 12, 5)

Function = Callable[[Tensor], Any]

OVER_WHOLE_DIMS: Mapping[str, tuple[Function, Layout]] = {
    "sum": (lambda x: x.sum(-1), Layout(1, (12,))),
    "sum of two": (lambda x: x.sum((0, 2)), Layout(0, (12,))),
    "sum kept": (lambda x: torch.sum(x, 0, keepdim=True), Layout(1, (12,))),
    "mean": (lambda x: x.mean(dim=0), Layout(0, (12,))),
    "any": (lambda x: (x > 0).any(0), Layout(0, (12,))),
    "all": (lambda x: (x > -1).all(-1, True), Layout(1, (12,))),
    "var": (lambda x: x.var(0, unbiased=False), Layout(0, (12,))),
    "var corrected": (lambda x: torch.var(x, dim=-1, correction=2, keepdim=True), Layout(1, (12,))),
    "std": (lambda x: x.std((0, 2)), Layout(0, (12,))),
    "amax": (lambda x: x.amax((0, -1)), Layout(0, (12,))),
    "amin": (lambda x: x.amin(0, keepdim=True), Layout(1, (12,))),
    "argmax": (lambda x: x.argmax(-1), Layout(1, (12,))),
    "argmin": (lambda x: x.argmin(0), Layout(0, (12,))),
    "prod": (lambda x: x.prod(0), Layout(0, (12,))),
    "norm": (lambda x: x.norm(dim=-1), Layout(1, (12,))),
    "norm of one kind": (lambda x: torch.norm(x, 1, 0), Layout(0, (12,))),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=2), Layout(1, (12,))),
    "logsumexp": (lambda x: x.logsumexp(0), Layout(0, (12,))),
    "logsumexp of two": (lambda x: torch.logsumexp(x, (0, 2)), Layout(0, (12,))),
    "softmax": (lambda x: F.softmax(x, dim=-1), Layout(1, (12,))),
    "softmax in another type": (lambda x: x.softmax(0, torch.float64), Layout(1, (12,))),
    "log_softmax": (lambda x: torch.log_softmax(x, 2), Layout(1, (12,))),
    "softmin": (lambda x: F.softmin(x, dim=0), Layout(1, (12,))),
    "cumsum": (lambda x: x.cumsum(-1), Layout(1, (12,))),
    "count_nonzero": (lambda x: x.count_nonzero(0), Layout(0, (12,))),
    "axis": (lambda x: torch.sum(x, axis=0), Layout(0, (12,))),
}
OF_PAIRS: Mapping[str, Function] = {
    "max": lambda x: x.max(0),
    "min": lambda x: torch.min(x, dim=-1, keepdim=True),
    "median": lambda x: x.median(-1),
    "topk": lambda x: x.topk(2, -1),
    "sort": lambda x: torch.sort(x, 0, descending=True),
    "kthvalue": lambda x: torch.kthvalue(x, 2, 0),
    "cummax": lambda x: x.cummax(2),
    "var_mean": lambda x: torch.var_mean(x, 0),
}
# What it gives, and how many sums, maxima and gathers it takes forward and backward.
OVER_THE_CUT_DIM: Mapping[str, tuple[Function, Layout | None, Mapping[str, int], Mapping[str, int]]] = {
    "sum": (lambda x: x.sum(1), None, {"sum": 1}, {}),
    "sum of all": (lambda x: x.sum(), None, {"sum": 1}, {}),
    "sum of squares": (lambda x: x.pow(2).sum(), None, {"sum": 1}, {}),
    "sum of two": (lambda x: x.sum((1, 2), keepdim=True), None, {"sum": 1}, {}),
    "mean": (lambda x: x.mean(dim=-2), None, {"sum": 1}, {}),
    "mean of all": (torch.mean, None, {"sum": 1}, {}),
    "any": (lambda x: (x > 2).any(), None, {"sum": 1}, {}),
    "all": (lambda x: (x > -1).all(1), None, {"sum": 1}, {}),
    "amax": (lambda x: x.amax(1), None, {"gather": 1}, {"sum": 1}),
    "max of all": (lambda x: x.max(), None, {"gather": 1}, {"sum": 1}),
    "min of all": (torch.min, None, {"gather": 1}, {"sum": 1}),
    "argmax": (lambda x: x.argmax(1, keepdim=True), None, {"gather": 1}, {}),
    "argmin": (lambda x: torch.argmin(x, dim=1), None, {"gather": 1}, {}),
    "max": (lambda x: x.max(1), None, {"gather": 1}, {}),
    "min": (lambda x: torch.min(x, dim=1, keepdim=True), None, {"gather": 1}, {}),
    "topk": (lambda x: torch.topk(x, 5, dim=1), None, {"gather": 1}, {}),
    "logsumexp": (lambda x: x.logsumexp(1), None, {"max": 1, "sum": 1}, {}),
    "softmax": (lambda x: F.softmax(x, dim=1), Layout(1, (12,)), {"max": 1, "sum": 1}, {"sum": 1}),
    "log_softmax": (lambda x: x.log_softmax(1), Layout(1, (12,)), {"max": 1, "sum": 1}, {"sum": 1}),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OVER_WHOLE_DIMS)
def test_over_whole_dims_nothing_is_exchanged(name: str, size: int) -> None:
    function, cut = OVER_WHOLE_DIMS[name]
    ran = agree(function, [X], {0: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((cut,), {}, {})


@pytest.mark.parametrize("name", OF_PAIRS)
def test_pairs_keep_their_names(name: str) -> None:
    function = OF_PAIRS[name]

    def named(x: Tensor) -> Any:
        result = function(x)
        assert type(result) is type(function(X))
        return result

    ran = agree(named, [X], {0: 1}, 2)
    assert (len(ran.cuts), ran.forward) == (2, {})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OVER_THE_CUT_DIM)
def test_over_the_cut_dim_results_are_exchanged(name: str, size: int) -> None:
    function, cut, forward, backward = OVER_THE_CUT_DIM[name]
    ran = agree(function, [X], {0: 1}, size)
    assert (ran.cuts[0], ran.forward, ran.backward) == (cut, forward, backward)


def test_larger_of_two_tensors() -> None:
    assert agree(torch.max, [X, random(12, 5)], {0: 1, 1: 0}, 2).cuts == (Layout(1, (12,)),)
    assert agree(lambda x, y: x.min(other=y), [X, random(12, 1)], {0: 1}, 2).backward == {"gather": 1}


@pytest.mark.parametrize("name", ["var", "std", "prod", "norm", "cumsum", "median", "argmax", "count_nonzero"])
def test_without_a_form_over_the_cut_dim_they_gather(name: str) -> None:
    agree(getattr(torch, name), [X], {0: 1}, 2, gathers=[name]) if name != "cumsum" else agree(
        lambda x: x.cumsum(1), [X], {0: 1}, 2, gathers=[name]
    )


def test_indices_need_one_segment() -> None:
    cut = Cut(dim=1, segments=(4, 8))
    agree(lambda x: x.argmax(1), [X], {0: cut}, 2, gathers=["argmax"])
    agree(lambda x: x.topk(2, 1), [X], {0: cut}, 2, gathers=["topk"])
    agree(lambda x: x.max(1), [X], {0: cut}, 2, gathers=["max"])
    assert agree(lambda x: x.softmax(1), [X], {0: cut}, 2).cuts == (Layout(1, (4, 8)),)
