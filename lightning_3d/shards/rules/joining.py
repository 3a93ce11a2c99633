"""Operations that put tensors or copies of them together, or exchange positions within a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.entering import cut
from lightning_3d.shards.rules.table import Function, RuleTable, spellings
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()


def _own(tensor: Tensor, beside: ShardTensor, along: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Returns a rank's part of a tensor that is put beside a shard, and the segments of it.

    Args:
        tensor: A shard or a replicated tensor.
        beside: The shard.
        along: Whether they follow each other along the dim that is cut.
    """
    if isinstance(tensor, ShardTensor):
        same_dims = tensor._dim == beside._dim and tensor._local.dim() == beside._local.dim()
        if not same_dims or (tensor.uneven if along else tensor._segments != beside._segments):
            raise Unshardable(f"its tensors are cut differently: {beside.cut} and {tensor.cut}")
        return tensor._local, tensor._segments
    if tensor.dim() != beside._local.dim():
        raise Unshardable("its tensors have different numbers of dims")
    length = tensor.size(beside._dim)
    segments = (length,) if along else beside._segments
    if (along and length % beside._group.size) or sum(segments) != length:
        raise Unshardable(f"a tensor of {tuple(tensor.shape)} beside one that is cut along {beside.cut}")
    return cut(tensor, beside._group, beside._dim, segments), segments


def _first_shard(tensors: Sequence[Tensor]) -> ShardTensor:
    return next(each for each in tensors if isinstance(each, ShardTensor))


def _is_skipped(tensor: Tensor) -> bool:
    """Whether torch skips it: empty and of one dim, whatever the dims of the others are."""
    return not isinstance(tensor, ShardTensor) and tensor.dim() == 1 and not tensor.numel()


@table.rule(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along a dim; if it is the one that is cut, each tensor brings its segments."""
    first = _first_shard(tensors)
    at = dim % first._local.dim()
    along = at == first._dim
    own = [_own(each, first, along) for each in tensors if not _is_skipped(each)]
    segments = tuple(length for _, lengths in own for length in lengths) if along else first._segments
    return first.like(torch.cat([part for part, _ in own], at), first._dim, segments)


@table.rule(torch.stack)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along a new dim."""
    first = _first_shard(tensors)
    at = dim % (first._local.dim() + 1)
    own = [_own(each, first, along=False)[0] for each in tensors]
    return first.like(torch.stack(own, at), first._dim + (at <= first._dim), first._segments)


@table.rule(*spellings("repeat_interleave"))
def repeat_interleave(x: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """Every position several times in a row."""
    if not isinstance(x, ShardTensor) or isinstance(repeats, ShardTensor) or dim is None:
        raise Unshardable("positions in the whole")
    at = dim % x.dim()
    if at != x._dim:
        local = x._local.repeat_interleave(repeats, at, output_size=output_size)
        return x.like(local, x._dim, x._segments)
    if isinstance(repeats, Tensor) or repeats < 1 or x.uneven:
        raise Unshardable("its positions become unequal in number")
    return x.like(x._local.repeat_interleave(repeats, at), at, tuple(each * repeats for each in x._segments))


def _within_dims(function: Function, x: ShardTensor, dims: Any, *args: Any) -> ShardTensor:
    asked = [dims] if isinstance(dims, int) else list(dims)
    if not asked or x._dim in {each % x.dim() for each in asked}:
        raise Unshardable("positions of the dim that is cut change places")
    return x.like(function(x._local, *args, asked), x._dim, x._segments)


@table.rule(*spellings("flip"))
def flip(x: ShardTensor, *dims: Any, **named: Any) -> ShardTensor:
    """Dims backwards."""
    asked = dims or (named["dims"],)
    return _within_dims(torch.flip, x, asked[0] if len(asked) == 1 else asked)


@table.rule(*spellings("roll"))
def roll(x: ShardTensor, shifts: Any, dims: Any = ()) -> ShardTensor:
    """Dims rotated."""
    return _within_dims(torch.roll, x, dims, [shifts] if isinstance(shifts, int) else shifts)


def _of_matrices(function: Function) -> Function:
    def rule(x: ShardTensor, diagonal: int = 0) -> Any:
        if x._dim >= x.dim() - 2:
            raise Unshardable("its matrices are cut")
        return x.like(function(x._local, diagonal), x._dim, x._segments)

    return rule


for _function in (*spellings("tril"), *spellings("triu")):
    table.add(_function, _of_matrices(_function))


@table.rule(F.pad)
def pad(x: ShardTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> ShardTensor:
    """Longer or shorter at the ends of the last dims."""
    last = x.dim() - 1
    if any(pad[2 * (last - x._dim) : 2 * (last - x._dim) + 2]):
        raise Unshardable("the dim that is cut gets longer")
    return x.like(F.pad(x._local, pad, mode, value), x._dim, x._segments)


@table.rule(F.glu)
def glu(x: ShardTensor, dim: int = -1) -> Any:
    """One half, gated by the other."""
    if dim % x.dim() != x._dim:
        return x.like(F.glu(x._local, dim), x._dim, x._segments)
    first, second = x.chunk(2, dim)
    return first * second.sigmoid()
