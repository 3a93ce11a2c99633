"""What tests of shards say often: run on thread ranks, cut a whole tensor, put parts together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join, take
from lightning_3d.shards.threads import ThreadShardGroup, run_threads

__all__ = ["ThreadShardGroup", "leaf", "run_threads", "whole"]


def leaf(tensor: Tensor, dim: int, group: ShardGroup, segments: Sequence[int] | None = None) -> Tensor:
    """Returns a rank's part of a whole tensor, as a leaf of its own storage that wants a gradient."""
    part = take(tensor.detach(), dim, segments or (tensor.shape[dim],), group.rank, group.size)
    return part.clone().requires_grad_()


def whole(parts: Sequence[Tensor], dim: int, segments: Sequence[int] | None = None) -> Tensor:
    """Puts the parts of all ranks together."""
    return join(parts, dim, segments or (sum(part.shape[dim] for part in parts),))
