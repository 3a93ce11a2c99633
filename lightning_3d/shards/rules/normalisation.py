"""Norms of layers over dims that are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.entering import cut, entered
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()


@table.rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """A norm over the last dims."""
    shard = _over_whole_dims("layer_norm", x, len(normalized_shape), weight, bias)
    out = F.layer_norm(shard._local, normalized_shape, _entered(weight, shard), _entered(bias, shard), eps)
    return shard.like(out, shard._dim, shard._segments)


@table.rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A norm over the last dims, without their mean."""
    shard = _over_whole_dims("rms_norm", x, len(normalized_shape), weight)
    out = F.rms_norm(shard._local, normalized_shape, _entered(weight, shard), eps)
    return shard.like(out, shard._dim, shard._segments)


@table.rule(F.group_norm, torch.group_norm)
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Norms over groups of channels, of which a rank may hold some."""
    shard = _over_whole_dims("group_norm", x, x.dim() - 2, weight, bias)
    group, dim, segments = shard._group, shard._dim, shard._segments
    if dim == 0:
        out = F.group_norm(shard._local, num_groups, _entered(weight, shard), _entered(bias, shard), eps)
    elif len(segments) == 1 and not shard.uneven and num_groups % group.size == 0:
        own_weight, own_bias = (None if each is None else cut(each, group, 0, segments) for each in (weight, bias))
        out = F.group_norm(shard._local, num_groups // group.size, own_weight, own_bias, eps)
    else:
        raise Unshardable(f"group_norm of {num_groups} groups over channels cut in {segments}")
    return shard.like(out, dim, segments)


@table.rule(F.normalize)
def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """Vectors of length one along a dim."""
    assert isinstance(x, ShardTensor)
    if dim % x.dim() == x._dim or out is not None:
        raise Unshardable("normalize over the dim that is cut")
    return x.like(F.normalize(x._local, p, dim, eps), x._dim, x._segments)


def _over_whole_dims(name: str, x: Tensor, last: int, *parameters: Tensor | None) -> ShardTensor:
    """The input, if it is cut along none of its last dims."""
    if not isinstance(x, ShardTensor) or any(isinstance(each, ShardTensor) for each in parameters):
        raise Unshardable(f"{name} whose parameters are cut")
    if x._dim >= x.dim() - last:
        raise Unshardable(f"{name} over the dim that is cut")
    return x


def _entered(parameter: Tensor | None, shard: ShardTensor) -> Tensor | None:
    return None if parameter is None else entered(parameter, shard._group)
