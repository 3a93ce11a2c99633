"""Replicated values that meet shards."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.shards import nodes
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.partial import PartialTensor


def entered(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns a replicated value for use on parts; uses of one value share the sum of their gradients."""
    return value.value if isinstance(value, PartialTensor) else nodes.shared_copy(value, group)


def cut(value: Tensor, group: ShardGroup, dim: int, segments: tuple[int, ...]) -> Tensor:
    """Returns this rank's part of a replicated value of full size along ``dim``."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return take(value, dim, segments, group.rank, group.size)
    return nodes.part(value, group, dim, segments)
