"""Reductions, softmax and choices: on parts where their dim is whole, by an exchange of results where it is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards import along, nodes
from lightning_3d.shards.late import scores
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.autocast import widened_by_autocast
from lightning_3d.shards.rules.table import RuleTable, spellings
from lightning_3d.shards.softmax import log_softmax as log_softmax_along
from lightning_3d.shards.softmax import logsumexp as logsumexp_along
from lightning_3d.shards.softmax import softmax as softmax_along
from lightning_3d.shards.tensor import ShardTensor

Function = Callable[..., Any]
DimArgument = int | Sequence[int] | None

table = RuleTable()

# Functions without a form over the dim that is cut: the position of their dim after the tensor, and its default.
_WHOLE_DIMS = (
    (
        0,
        None,
        ("var", "std", "var_mean", "std_mean", "prod", "median", "nanmedian", "nansum", "nanmean", "count_nonzero"),
    ),
    (0, None, ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")),
    (0, -1, ("mode", "sort", "argsort")),
    (1, -1, ("kthvalue",)),
    (1, None, ("norm", "quantile", "nanquantile")),
)


def _over_whole_dims(function: Function, position: int, default: int | None) -> Function:
    """Makes the rule of a function that needs all of its dims on each rank."""

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        shard = _shard(x, function)
        dims = _dims(dim, shard)
        if shard._dim in dims:
            raise Unshardable(f"{function.__name__} over the dim that is cut")
        return _results(shard, function(shard._local, *args, **kwargs), dims)

    return rule


for _position, _default, _names in _WHOLE_DIMS:
    for _name in _names:
        for _function in spellings(_name):
            table.add(_function, _over_whole_dims(_function, _position, _default))
table.add(torch.linalg.vector_norm, _over_whole_dims(torch.linalg.vector_norm, 1, None))
table.add(F.softmin, _over_whole_dims(F.softmin, 0, None))


@table.rule(*spellings("sum"))
def sum_(x: Tensor, dim: DimArgument = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sums: over the dim that is cut by one sum over the ranks."""
    shard = _shard(x, torch.sum)
    dims = _dims(dim, shard)
    if shard._dim in dims:
        return along.total(widened_by_autocast(shard._local, "cuda"), shard._group, dims, keepdim, dtype)
    return _result(shard, shard._local.sum(dims, keepdim, dtype=dtype), dims)


@table.rule(*spellings("mean"))
def mean(x: Tensor, dim: DimArgument = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Means: over the dim that is cut by one sum over the ranks."""
    shard = _shard(x, torch.mean)
    dims = _dims(dim, shard)
    if shard._dim in dims:
        count = math.prod(shard.size(each) for each in dims)
        return along.mean(shard._local, shard._group, dims, count, keepdim, dtype)
    return _result(shard, shard._local.mean(dims, keepdim, dtype=dtype), dims)


@table.rule(*spellings("any"))
def any_(x: Tensor, dim: DimArgument = None, keepdim: bool = False) -> Tensor:
    """Whether any element is true."""
    shard = _shard(x, torch.any)
    dims = _dims(dim, shard)
    found = shard._local.any(dims, keepdim)
    if shard._dim in dims:
        return nodes.reduce(found.long(), shard._group) > 0
    return _result(shard, found, dims)


@table.rule(*spellings("all"))
def all_(x: Tensor, dim: DimArgument = None, keepdim: bool = False) -> Tensor:
    """Whether all elements are true."""
    shard = _shard(x, torch.all)
    dims = _dims(dim, shard)
    found = shard._local.all(dims, keepdim)
    if shard._dim in dims:
        return nodes.reduce((~found).long(), shard._group) == 0
    return _result(shard, found, dims)


@table.rule(*spellings("amax"))
def amax(x: Tensor, dim: DimArgument = (), keepdim: bool = False) -> Tensor:
    """Largest values."""
    return _extreme(x, dim, keepdim, torch.amax, along.amax)


@table.rule(*spellings("amin"))
def amin(x: Tensor, dim: DimArgument = (), keepdim: bool = False) -> Tensor:
    """Smallest values."""
    return _extreme(x, dim, keepdim, torch.amin, along.amin)


@table.rule(*spellings("max"))
def max_(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The largest value, the largest ones along a dim and where they are, or the larger ones of two tensors."""
    return _extreme_of_three_kinds(x, dim, keepdim, other, (torch.max, torch.maximum, along.amax, along.largest))


@table.rule(*spellings("min"))
def min_(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """The smallest value, the smallest ones along a dim and where they are, or the smaller ones of two tensors."""
    return _extreme_of_three_kinds(x, dim, keepdim, other, (torch.min, torch.minimum, along.amin, along.smallest))


@table.rule(*spellings("argmax"))
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest values are."""
    return _where(x, dim, keepdim, torch.argmax, along.argmax)


@table.rule(*spellings("argmin"))
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest values are."""
    return _where(x, dim, keepdim, torch.argmin, along.argmin)


@table.rule(*spellings("topk"))
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """The largest or smallest values along a dim."""
    shard = _shard(x, torch.topk)
    dims = _dims(dim, shard)
    if shard._dim in dims:
        group = _ordered(shard, torch.topk)
        return along.topk(shard._local, group, k, dims[0], shard.size(shard._dim), largest, sorted)
    return _results(shard, torch.topk(shard._local, k, dims[0], largest, sorted), dims)


@table.rule(*spellings("logsumexp"), torch.special.logsumexp)
def logsumexp(x: Tensor, dim: DimArgument, keepdim: bool = False) -> Tensor:
    """Logarithms of sums of powers."""
    shard = _shard(x, torch.logsumexp)
    dims = _dims(dim, shard)
    if shard._dim not in dims:
        return _result(shard, shard._local.logsumexp(dims, keepdim), dims)
    if len(dims) > 1:
        raise Unshardable("logsumexp over several dims of which one is cut")
    return logsumexp_along(widened_by_autocast(shard._local, "cuda"), shard._group, dims[0], keepdim)


@table.rule(*spellings("softmax"), torch.special.softmax)
def softmax(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Tensor:
    """Softmax: over the dim that is cut by one max and one sum over the ranks."""
    return _softmax(x, dim, dtype, torch.softmax, softmax_along)


@table.rule(*spellings("log_softmax"), torch.special.log_softmax)
def log_softmax(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Tensor:
    """Logarithm of softmax: over the dim that is cut by one max and one sum over the ranks."""
    return _softmax(x, dim, dtype, torch.log_softmax, log_softmax_along)


def _softmax(x: Tensor, dim: int | None, dtype: torch.dtype | None, local: Function, exchanged: Function) -> Tensor:
    shard = _shard(x, local)
    if dim is None:
        raise Unshardable(f"{local.__name__} without a dim")
    if dim % shard.dim() == shard._dim:
        out = exchanged(widened_by_autocast(shard._local, "cuda"), shard._group, shard._dim, dtype)
    else:
        out = local(shard._local, dim, dtype=dtype)
    return shard.like(out, shard._dim, shard._segments)


def _extreme(x: Tensor, dim: DimArgument, keepdim: bool, local: Function, exchanged: Function) -> Tensor:
    shard = _shard(x, local)
    dims = _dims(dim, shard)
    if shard._dim in dims:
        result: Tensor = exchanged(shard._local, shard._group, dims, keepdim)
        return result
    return _result(shard, local(shard._local, dims, keepdim), dims)


def _extreme_of_three_kinds(
    x: Tensor, dim: int | Tensor | None, keepdim: bool, other: Tensor | None, functions: tuple[Function, ...]
) -> Any:
    local, of_two, of_all, exchanged = functions
    if other is not None or isinstance(dim, Tensor):
        return of_two(x, dim if other is None else other)
    shard = _shard(x, local)
    if dim is None:
        return of_all(shard._local, shard._group, _dims(None, shard))
    dims = _dims(dim, shard)
    if shard._dim in dims:
        return exchanged(shard._local, _ordered(shard, local), dims[0], shard.size(shard._dim), keepdim)
    return _results(shard, local(shard._local, dims[0], keepdim), dims)


def _where(x: Tensor, dim: int | None, keepdim: bool, local: Function, exchanged: Function) -> Tensor:
    shard = _shard(x, local)
    if dim is None:
        raise Unshardable(f"{local.__name__} without a dim")
    dims = _dims(dim, shard)
    if shard._dim in dims:
        group = _ordered(shard, local)
        result: Tensor = exchanged(scores(shard), group, dims[0], shard.size(shard._dim), keepdim)
        return result
    return _result(shard, local(scores(shard), dims[0], keepdim), dims)


def _ordered(shard: ShardTensor, function: Function) -> Any:
    """The group of a tensor of which each rank holds one run: where something is can be told."""
    if len(shard._segments) > 1:
        raise Unshardable(f"{function.__name__} over a dim that is cut in several segments")
    return shard._group


def _shard(x: Tensor, function: Function) -> ShardTensor:
    if not isinstance(x, ShardTensor):
        raise Unshardable(f"{function.__name__} of a replicated tensor with arguments that are cut")
    return x


def _dims(dim: Any, shard: ShardTensor) -> tuple[int, ...]:
    """Dims from the front; all of them where torch means all."""
    count = shard.dim()
    # True and False are no dims: var(unbiased).
    if dim is None or isinstance(dim, bool) or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(count))
    return (dim % count,) if isinstance(dim, int) else tuple(each % count for each in dim)


def _result(shard: ShardTensor, out: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The local result of a function over whole dims, as a shard."""
    gone = 0 if out.dim() == shard.dim() else sum(each < shard._dim for each in dims)
    return shard.like(out, shard._dim - gone, shard._segments)


def _results(shard: ShardTensor, out: Any, dims: tuple[int, ...]) -> Any:
    if isinstance(out, Tensor):
        return _result(shard, out, dims)
    results = [_result(shard, each, dims) for each in out]
    # torch's named results are made from one sequence.
    return tuple(results) if type(out) is tuple else type(out)(results)
