"""Batch normalisation over the batches of all data ranks, as ``Trainer(sync_batchnorm=True)`` asks for it.

Torch's SyncBatchNorm is another module than the user's, and runs on accelerators only. Here the user's own modules stay
where they are, and their ``forward`` takes its statistics from all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_3d.graph.calls import Call, around_forward


def normalise_over_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Has every batch normalisation of a module in training take mean and variance over a group.

    Until `lightning_3d.graph.calls.plain_calls`. A call in training is then a collective.

    Args:
        module: The user's module.
        group: The data axis.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            around_forward(part, partial(_normalised, part, group))


def _normalised(part: _BatchNorm, group: dist.ProcessGroup, call: Call) -> Any:
    if not part.training:
        return call()
    values: Tensor = call.args[0] if call.args else call.kwargs["input"]
    # Narrow types are too coarse for moments.
    wide = values if values.dtype == torch.float64 else values.float()
    mean, variance, count = _moments(wide, group)
    _follow(part, mean.detach(), variance.detach(), count)
    shape = (1, -1, *[1] * (values.dim() - 2))
    scale = torch.rsqrt(variance + part.eps)
    if part.affine:
        scale = scale * part.weight.to(wide.dtype)
    result = (wide - mean.view(shape)) * scale.view(shape)
    if part.affine:
        result = result + part.bias.to(wide.dtype).view(shape)
    return result.to(values.dtype)


def _moments(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all ranks, and of how many values.

    Parts are joined as in Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances": the squares are those of differences from the means, so that nothing cancels.
    """
    dims = [dim for dim in range(values.dim()) if dim != 1]
    mean = values.mean(dims)
    squares = (values - mean.view(1, -1, *[1] * (values.dim() - 2))).square().sum(dims)
    count = torch.full_like(mean, values.numel() // values.size(1))
    means, sums, counts = _FromAll.apply(torch.stack([mean, squares, count]), group).unbind(1)  # type: ignore[no-untyped-call]
    total = counts.sum(0)
    whole = (means * counts).sum(0) / total
    variance = (sums + counts * (means - whole).square()).sum(0) / total
    return whole, variance, total[0].detach()


@torch.no_grad()
def _follow(part: _BatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Moves the running statistics, as torch's own do."""
    if not part.track_running_stats or part.running_mean is None or part.running_var is None:
        return
    assert part.num_batches_tracked is not None
    part.num_batches_tracked.add_(1)
    momentum = 1.0 / float(part.num_batches_tracked) if part.momentum is None else part.momentum
    part.running_mean.lerp_(mean.to(part.running_mean.dtype), momentum)
    unbiased = variance * (count / (count - 1))
    part.running_var.lerp_(unbiased.to(part.running_var.dtype), momentum)


class _FromAll(torch.autograd.Function):
    """Stacks the tensors of a group; in backward each rank's gets the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty((group.size(), *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None
