"""Embeddings whose table is cut along the vocabulary or along the features.

After Shoeybi et al. 2019, "Megatron-LM", section 3 (the vocabulary-parallel input embedding).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.entering import entered
from lightning_3d.shards.rules.sequence import summed
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()


@table.rule(F.embedding)
def embedding(
    indices: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table."""
    for name, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            raise Unshardable(f"embedding with {name}")
    if not isinstance(weight, ShardTensor):
        assert isinstance(indices, ShardTensor)
        rows = F.embedding(indices._local, entered(weight, indices._group), padding_idx)
        return indices.like(rows, indices._dim, indices._segments)
    if isinstance(indices, ShardTensor):
        raise Unshardable("both the indices and the table are cut")
    if weight._dim == 1:
        return weight.like(F.embedding(indices, weight._local, padding_idx), -1, weight._segments)
    if len(weight._segments) > 1:
        raise Unshardable("the vocabulary is cut in several segments")
    return summed(_own_rows(indices, weight, padding_idx), weight)


def _own_rows(indices: Tensor, weight: ShardTensor, padding_idx: int | None) -> Tensor:
    """Rows that this rank holds, and zeros for those of other ranks."""
    words = weight.shape[0]
    ((start, rows),) = weight.cut.runs(weight._group.rank, weight._group.size)
    # An index that no rank holds stays out of bounds, for torch to find.
    elsewhere = ((indices >= 0) & (indices < start)) | ((indices >= start + rows) & (indices < words))
    padding = None if padding_idx is None else padding_idx % words - start
    if padding is not None and not 0 <= padding < rows:
        padding = None
    own = F.embedding((indices - start).masked_fill(elsewhere, 0), weight._local, padding)
    return own.masked_fill(elsewhere.unsqueeze(-1), 0)
