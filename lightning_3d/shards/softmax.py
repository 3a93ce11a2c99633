"""Softmax over the dim that is cut, on plain local tensors: one max and one sum over the ranks.

A rank holds one run of the dim, long or short. Everything is computed in 32 bits at least and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.protocol import applied, one_call


@one_call
def softmax(local: Tensor, group: ShardGroup, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns this rank's part of `torch.softmax` over the cut dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        dtype: Of the result; the tensor's own by default.
    """
    result: Tensor = applied(_Softmax, local, group, dim, dtype or local.dtype)
    return result


@one_call
def log_softmax(local: Tensor, group: ShardGroup, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns this rank's part of `torch.log_softmax` over the cut dim.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        dtype: Of the result; the tensor's own by default.
    """
    result: Tensor = applied(_LogSoftmax, local, group, dim, dtype or local.dtype)
    return result


@one_call
def logsumexp(local: Tensor, group: ShardGroup, dim: int, keepdim: bool = False) -> Tensor:
    """Returns `torch.logsumexp` over the cut dim, replicated.

    Args:
        local: This rank's part.
        group: The ranks.
        dim: The cut dim.
        keepdim: Keeps the dim, of length one.
    """
    kept: Tensor = applied(_LogSumExp, local, group, dim)
    return kept if keepdim else kept.squeeze(dim)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ShardGroup, dim: int, dtype: torch.dtype) -> Tensor:
        powers = (local - _largest(local, group, dim)).exp_()
        result = powers.div_(group.sum(powers.sum(dim, keepdim=True))).to(dtype)
        ctx.save_for_backward(result)
        ctx.group, ctx.dim, ctx.dtype = group, dim, local.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        product = gradient * result
        common = ctx.group.sum(product.sum(ctx.dim, keepdim=True, dtype=_work_dtype(product)))
        return ((gradient - common) * result).to(ctx.dtype), None, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ShardGroup, dim: int, dtype: torch.dtype) -> Tensor:
        shifted = local - _largest(local, group, dim)
        result = shifted.sub_(group.sum(shifted.exp().sum(dim, keepdim=True)).log_()).to(dtype)
        ctx.save_for_backward(result)
        ctx.group, ctx.dim, ctx.dtype = group, dim, local.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        common = ctx.group.sum(gradient.sum(ctx.dim, keepdim=True, dtype=_work_dtype(gradient)))
        return (gradient - result.exp() * common).to(ctx.dtype), None, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ShardGroup, dim: int) -> Tensor:
        largest = _largest(local, group, dim)
        # An infinite one would make NaN of itself; without it the sum is as infinite as it should be.
        largest = largest.masked_fill(largest.isinf(), 0)
        result = group.sum((local - largest).exp_().sum(dim, keepdim=True)).log_().add_(largest)
        ctx.save_for_backward(local, result)
        return result.to(local.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        local, result = ctx.saved_tensors
        return (local - result).exp_().mul_(gradient).to(local.dtype), None, None


def _largest(local: Tensor, group: ShardGroup, dim: int) -> Tensor:
    return group.max(local.amax(dim, keepdim=True).to(_work_dtype(local)))


def _work_dtype(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)
