"""Reductions and choices along the dim that is cut, on plain local tensors, without gathering them.

A rank holds one run of the dim, the last rank perhaps a shorter one. Results are replicated, and so are their
gradients: the gradient of a local tensor is its part of the whole gradient. Indices are global.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import extended, longest, own_length
from lightning_3d.shards.nodes import reduce
from lightning_3d.shards.protocol import applied, one_call

Dims = int | tuple[int, ...]
# Values and indices: torch.return_types.max, .min or .topk.
Choice = Any


@one_call
def total(
    local: Tensor, group: ShardGroup, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sum over dims of which one is cut: `torch.sum`, by one sum over the ranks.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: One or more dims, the cut one among them.
        keepdim: Keeps the dims, of length one.
        dtype: Of the result; None as in torch.
    """
    result = dtype or (local.dtype if local.is_floating_point() else torch.int64)
    # Rounded once, after the sum over the ranks.
    work = torch.promote_types(result, torch.float32) if result.is_floating_point else result
    return reduce(local.sum(dim, keepdim, dtype=work), group).to(result)


@one_call
def mean(
    local: Tensor,
    group: ShardGroup,
    dim: Dims,
    count: int,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the mean over dims of which one is cut: `torch.mean`, by one sum over the ranks.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: One or more dims, the cut one among them.
        count: Elements of each mean.
        keepdim: Keeps the dims, of length one.
        dtype: Of the result; None as in torch.
    """
    result = dtype or local.dtype
    work = torch.promote_types(result, torch.float32)
    return reduce(local.sum(dim, keepdim, dtype=work) / count, group).to(result)


@one_call
def amax(local: Tensor, group: ShardGroup, dim: Dims, keepdim: bool = False) -> Tensor:
    """Returns the largest values over dims of which one is cut: `torch.amax`; equal ones share the gradient.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: One or more dims, the cut one among them.
        keepdim: Keeps the dims, of length one.
    """
    return _extreme(local, group, dim, keepdim, True)


@one_call
def amin(local: Tensor, group: ShardGroup, dim: Dims, keepdim: bool = False) -> Tensor:
    """Returns the smallest values over dims of which one is cut: `torch.amin`; equal ones share the gradient.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: One or more dims, the cut one among them.
        keepdim: Keeps the dims, of length one.
    """
    return _extreme(local, group, dim, keepdim, False)


@one_call
def largest(local: Tensor, group: ShardGroup, dim: int, length: int, keepdim: bool = False) -> Choice:
    """Returns the largest values along the cut dim and where they are: `torch.max` with a dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        length: Global length of the cut dim.
        keepdim: Keeps the dim, of length one.

    Returns:
        Values and global indices; of equal values the first.
    """
    return torch.return_types.max(_first(local, group, dim, length, keepdim, True))


@one_call
def smallest(local: Tensor, group: ShardGroup, dim: int, length: int, keepdim: bool = False) -> Choice:
    """Returns the smallest values along the cut dim and where they are: `torch.min` with a dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        length: Global length of the cut dim.
        keepdim: Keeps the dim, of length one.

    Returns:
        Values and global indices; of equal values the first.
    """
    return torch.return_types.min(_first(local, group, dim, length, keepdim, False))


@one_call
def argmax(local: Tensor, group: ShardGroup, dim: int, length: int, keepdim: bool = False) -> Tensor:
    """Returns where along the cut dim the largest values are: `torch.argmax` with a dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        length: Global length of the cut dim.
        keepdim: Keeps the dim, of length one.
    """
    return _first(local.detach(), group, dim, length, keepdim, True)[1]


@one_call
def argmin(local: Tensor, group: ShardGroup, dim: int, length: int, keepdim: bool = False) -> Tensor:
    """Returns where along the cut dim the smallest values are: `torch.argmin` with a dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        length: Global length of the cut dim.
        keepdim: Keeps the dim, of length one.
    """
    return _first(local.detach(), group, dim, length, keepdim, False)[1]


@one_call
def topk(
    local: Tensor,
    group: ShardGroup,
    k: int,
    dim: int,
    length: int,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> Choice:
    """Returns the k largest or smallest values along the cut dim: `torch.topk`.

    Args:
        local: This rank's part.
        group: The ranks.
        k: How many; at most the dim's global length.
        dim: The cut dim.
        length: Global length of the cut dim.
        largest: False takes the smallest.
        sorted: Whether they come in order.

    Returns:
        Values and global indices. Which of equal values are taken is as open as in torch.
    """
    return torch.return_types.topk(applied(_Choose, local, group, dim % local.dim(), length, k, largest, sorted))


@one_call
def pick(local: Tensor, group: ShardGroup, dim: int, index: Tensor, length: int) -> Tensor:
    """Returns the values at global indices along the cut dim: `torch.gather`, by one sum over the ranks.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        index: Replicated; of as many dims as the tensor.
        length: Global length of the cut dim.

    Raises:
        IndexError: An index is out of bounds. On an accelerator it is the kernel that fails, later.
    """
    picked: Tensor = applied(_Pick, local, group, dim % local.dim(), length, index)
    return picked


def own_positions(index: Tensor, group: ShardGroup, length: int) -> tuple[Tensor, Tensor]:
    """Turns global indices into positions on this rank.

    Args:
        index: Global indices along the cut dim.
        group: The ranks.
        length: Global length of the cut dim.

    Returns:
        Positions, 0 for those of other ranks, and which are this rank's.
    """
    positions = index - group.rank * longest(length, group.size)
    held = (positions >= 0) & (positions < own_length(length, group.rank, group.size))
    return positions.masked_fill(~held, 0), held


@one_call
def checked_positions(index: Tensor, group: ShardGroup, length: int) -> tuple[Tensor, Tensor]:
    """Returns `own_positions` of indices that may come from the user.

    Args:
        index: Global indices along the cut dim.
        group: The ranks.
        length: Global length of the cut dim.

    Raises:
        IndexError: An index is out of bounds. On an accelerator it is the kernel that fails, later.
    """
    # No rank holds an index that is out of bounds, so that none would see it: torch is to find it.
    torch.zeros(1, dtype=torch.bool, device=index.device).expand(length).index_select(0, index.reshape(-1))
    return own_positions(index, group, length)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ShardGroup, dim: int, length: int, index: Tensor) -> Tensor:
        positions, held = checked_positions(index, group, length)
        ctx.save_for_backward(positions, held)
        ctx.dim, ctx.shape = dim, local.shape
        return group.sum(local.gather(dim, positions).masked_fill(~held, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(gradient, ctx), None, None, None, None


class _Choose(torch.autograd.Function):
    """The first extreme value (no ``k``), or ``k`` of them: of each rank's own, then of what all have found."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, group: ShardGroup, dim: int, length: int, k: int | None, most: bool, ordered: bool
    ) -> tuple[Tensor, Tensor]:
        values, index = _chosen(local, dim, k and min(k, local.shape[dim]), most, ordered)
        found = torch.stack([_bits(values), index + group.rank * longest(length, group.size)])
        bits, indices = _all_found(found, group, dim + 1, length, 1 if k is None else k)
        best, position = _chosen(_from_bits(bits, local.dtype), dim, k, most, ordered)
        index = indices.gather(dim, position)
        ctx.save_for_backward(*own_positions(index, group, length))
        ctx.dim, ctx.shape = dim, local.shape
        ctx.mark_non_differentiable(index)
        return best, index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(gradient, ctx), None, None, None, None, None, None


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ShardGroup, dims: Dims, most: bool) -> Tensor:
        extreme = torch.amax if most else torch.amin
        # Not the ranks' max: what it makes of a NaN is the backend's affair.
        found = group.gather(extreme(local, dims, keepdim=True)[None], 0, (group.size,))
        result = extreme(found, 0)
        ctx.save_for_backward(local, result)
        ctx.group, ctx.dims = group, dims
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        local, result = ctx.saved_tensors
        equal = local == result
        count = ctx.group.sum(equal.sum(ctx.dims, keepdim=True))
        return equal * (gradient / count), None, None, None


def _extreme(local: Tensor, group: ShardGroup, dim: Dims, keepdim: bool, most: bool) -> Tensor:
    kept: Tensor = applied(_Extreme, local, group, dim, most)
    return kept if keepdim else kept.squeeze(dim)


def _first(local: Tensor, group: ShardGroup, dim: int, length: int, keepdim: bool, most: bool) -> tuple[Tensor, Tensor]:
    values, index = applied(_Choose, local, group, dim % local.dim(), length, None, most, True)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _all_found(found: Tensor, group: ShardGroup, dim: int, length: int, k: int) -> Tensor:
    """What all ranks have found, up to ``k`` each: the last one perhaps less."""
    each = min(k, longest(length, group.size))
    of_last = min(k, own_length(length, group.size - 1, group.size))
    everything = group.gather(extended(found, dim, each), dim, (each * group.size,))
    return everything.narrow(dim, 0, each * (group.size - 1) + of_last)


def _chosen(values: Tensor, dim: int, k: int | None, most: bool, ordered: bool) -> tuple[Tensor, Tensor]:
    if k is not None:
        return torch.topk(values, k, dim, most, ordered)
    return torch.max(values, dim, keepdim=True) if most else torch.min(values, dim, keepdim=True)


def _bits(values: Tensor) -> Tensor:
    """Exact 64 bits of each value, so that values and indices travel as one tensor."""
    return values.double().view(torch.int64) if values.is_floating_point() else values.long()


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return (bits.view(torch.float64) if dtype.is_floating_point else bits).to(dtype)


def _scattered(gradient: Tensor, ctx: Any) -> Tensor:
    positions, held = ctx.saved_tensors
    return gradient.new_zeros(ctx.shape).scatter_add_(ctx.dim, positions, gradient.masked_fill(~held, 0))
