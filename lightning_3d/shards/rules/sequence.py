"""Where partial results are summed, and where the whole of a sequence is needed.

With sequence parallelism a sum leaves its result cut along the sequence, and what needs the whole gathers it: as many
bytes as the sum of everything, with a part of the norms and residuals between on each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.shards import nodes
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.tensor import ShardTensor


def summed(partial: Tensor, shard: ShardTensor, dim: int | None = -2) -> Tensor:
    """Returns the sum over the ranks of partial results: replicated, or cut along the sequence.

    Args:
        partial: This rank's.
        shard: An operand; the result is of its class.
        dim: The sequence, None for a replicated result. Rows of a matrix are cut as those that were gathered before.
    """
    group, dims = shard._group, partial.dim()
    if group.options.sequence and dim is not None and dims > 1:
        dim %= dims
        rows = partial.shape[dim]
        segments = group.rows_of(rows) if dims == 2 else (rows,) if rows % group.size == 0 else None
        if segments is not None:
            return shard.like(nodes.reduce_part(partial, group, dim, segments), dim, segments)
    return nodes.reduce(partial, group)


def whole_sequence(shard: ShardTensor) -> Tensor:
    """Returns the whole of what is cut along its sequence, for use on parts; all its uses share one gather.

    Raises:
        Unshardable: It is cut otherwise.
    """
    group, local = shard._group, shard._local
    if not group.options.sequence or shard._dim == local.dim() - 1 or shard.uneven:
        raise Unshardable(f"the input is cut along {shard.cut} of {local.dim()}, the weight along its outputs")
    if local.dim() == 2:
        group.keep_rows(shard._segments)
    if local.is_inference():
        return nodes.gather_sum(local, group, shard._dim, shard._segments)
    kept = group.shared_copy(local)
    if kept is None or kept.requires_grad < (torch.is_grad_enabled() and local.requires_grad):
        kept = nodes.gather_sum(local, group, shard._dim, shard._segments)
        group.keep_copy(local, kept)
    return kept
