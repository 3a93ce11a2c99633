"""The autograd nodes between replicated values and shards, on plain local tensors.

Each is one call in torch's function protocol: a TorchFunctionMode sees the node and never looks inside. A gradient of a
replicated value is the same on all ranks; a gradient of a part is the part of the whole gradient. Sums of gradients are
in the nodes where one replicated value was used on many parts. Nodes come in pairs, each the backward of the other:
copy and reduce, gather and part, reduce_part and gather_sum. So gradients of gradients are exact too.

After Shoeybi et al. 2019, "Megatron-LM", section 3 (f and g), and Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2 (their sequence-parallel forms).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import by_rank, take
from lightning_3d.shards.protocol import applied, one_call

Segments = tuple[int, ...]


@one_call
def copy(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns a replicated value for use on parts: its gradient is the sum over the ranks."""
    result: Tensor = applied(_Copy, value, group)
    return result


@one_call
def reduce(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns the sum over the ranks of their partial results, replicated."""
    result: Tensor = applied(_Reduce, value, group)
    return result


@one_call
def gather(part: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
    """Returns the whole tensor, replicated, from every rank's part."""
    result: Tensor = applied(_Gather, part, group, dim, segments)
    return result


@one_call
def part(whole: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
    """Returns this rank's part of a replicated value."""
    result: Tensor = applied(_Part, whole, group, dim, segments)
    return result


@one_call
def reduce_part(value: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
    """Returns this rank's part, along ``dim``, of the sum of partial results."""
    result: Tensor = applied(_ReducePart, value, group, dim, segments)
    return result


@one_call
def gather_sum(part: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
    """Returns the whole tensor for use on parts: the gradient of a part is its part of the sum over the ranks."""
    result: Tensor = applied(_GatherSum, part, group, dim, segments)
    return result


def shared_copy(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns a replicated value for use on parts; uses of one value share the sum of their gradients."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value
    kept = group.shared_copy(value)
    if kept is None:
        kept = copy(value, group)
        group.keep_copy(value, kept)
    return kept


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup) -> Tensor:
        ctx.group = group
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return copy(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
        ctx.group, ctx.dim, ctx.segments = group, dim, segments
        return group.gather(own, dim, segments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return part(gradient, ctx.group, ctx.dim, ctx.segments), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
        ctx.group, ctx.dim, ctx.segments = group, dim, segments
        # A copy: a view would let an operation in place on the part change the whole on this rank alone.
        own = take(whole, dim, segments, group.rank, group.size)
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather(gradient, ctx.group, ctx.dim, ctx.segments), None, None, None


class _ReducePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
        ctx.group, ctx.dim, ctx.segments = group, dim, segments
        return group.sum_part(by_rank(value, dim, segments, group.size), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_sum(gradient, ctx.group, ctx.dim, ctx.segments), None, None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ShardGroup, dim: int, segments: Segments) -> Tensor:
        ctx.group, ctx.dim, ctx.segments = group, dim, segments
        return group.gather(own, dim, segments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_part(gradient, ctx.group, ctx.dim, ctx.segments), None, None, None
