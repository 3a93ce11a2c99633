"""What tests of shards say often: run on thread ranks, cut a whole tensor, put parts together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join, take
from lightning_3d.shards.threads import ThreadShardGroup, run_threads

__all__ = ["ThreadShardGroup", "compare", "leaf", "random", "run_threads", "whole"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns normal numbers, the same for each dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(tensor: Tensor, dim: int, group: ShardGroup, segments: Sequence[int] | None = None) -> Tensor:
    """Returns a rank's part of a whole tensor, as a leaf of its own storage that wants a gradient."""
    part = take(tensor.detach(), dim, segments or (tensor.shape[dim],), group.rank, group.size)
    return part.clone().requires_grad_()


def whole(parts: Sequence[Tensor], dim: int, segments: Sequence[int] | None = None) -> Tensor:
    """Puts the parts of all ranks together."""
    return join(parts, dim, segments or (sum(part.shape[dim] for part in parts),))


def compare(
    ours: Callable[[Tensor, ShardGroup], Tensor],
    theirs: Callable[[Tensor], Tensor],
    tensor: Tensor,
    *,
    dim: int,
    size: int,
    sharded: bool = False,
    tolerance: float = 1e-12,
) -> None:
    """Asserts that results and gradients of thread ranks are those of one device, absolutely and relatively.

    Args:
        ours: Gets a rank's part.
        theirs: Gets the whole tensor.
        tensor: The whole tensor.
        dim: The dim that is cut.
        size: Number of ranks.
        sharded: Whether results are parts too, cut along the same dim, else replicated.
        tolerance: For both.
    """
    one = tensor.clone().requires_grad_()
    expected = theirs(one)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    expected.backward(seed)
    assert one.grad is not None

    def fn(group: ThreadShardGroup) -> tuple[Tensor, Tensor]:
        local = leaf(tensor, dim, group)
        result = ours(local, group)
        result.backward(take(seed, dim, (seed.shape[dim],), group.rank, group.size) if sharded else seed)
        assert local.grad is not None
        return result.detach(), local.grad

    results, gradients = zip(*run_threads(size, fn), strict=True)
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    for result in [whole(results, dim)] if sharded else results:
        close(result, expected.detach())
    close(whole(gradients, dim), one.grad)
