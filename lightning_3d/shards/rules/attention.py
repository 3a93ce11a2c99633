"""Attention, cut along its heads: every rank computes the heads that it holds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.layout import take
from lightning_3d.shards.random import attention_with_dropout
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.contractions import mapped
from lightning_3d.shards.rules.entering import entered
from lightning_3d.shards.rules.pointwise import own_operand
from lightning_3d.shards.rules.sequence import whole_sequence
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

# Heads are the third dim from the end of queries, keys and values.
_HEADS = 3

table = RuleTable()


@table.rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of the heads, or of the batches, that are cut."""
    shard = next(each for each in (query, key, value, attn_mask) if isinstance(each, ShardTensor))
    place = shard.dim() - shard._dim
    if place < _HEADS:
        raise Unshardable(f"attention over {shard.cut} of {shard.dim()}")
    if not isinstance(query, ShardTensor) and query.shape[-place] != shard.shape[-place]:
        raise Unshardable("attention whose queries are not cut and have other heads than its keys")
    own_query = own_operand(query, shard)
    own_key, own_value = (_for_queries(each, query, shard, place) for each in (key, value))
    mask = None if attn_mask is None else own_operand(attn_mask, shard)
    shared = place == _HEADS and own_key.shape[-_HEADS] != own_query.shape[-_HEADS]
    dim, segments = query.dim() - place, shard._segments
    if dropout_p:
        out = attention_with_dropout(
            own_query, own_key, own_value, mask, shard._group, dim, segments, dropout_p, is_causal, scale, shared
        )
    else:
        out = F.scaled_dot_product_attention(
            own_query, own_key, own_value, mask, 0.0, is_causal, scale=scale, enable_gqa=shared
        )
    return shard.like(out, dim, segments)


@table.rule(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `torch.nn.MultiheadAttention` calls, as the operations that it is made of."""
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise Unshardable("attention with keys and values that are added to the sequence")
    packed = (in_proj_weight,) if not use_separate_proj_weight else (q_proj_weight, k_proj_weight, v_proj_weight)
    if not all(isinstance(weight, ShardTensor) for weight in packed):
        raise Unshardable("attention whose input weights are not cut")
    batched = query.dim() == 3
    sequence_dim = query._dim if isinstance(query, ShardTensor) else None
    if not batched:
        query, key, value, key_padding_mask = _one_batch(query, key, value, key_padding_mask)
    projected = _projected(query, key, value, packed, in_proj_bias)
    heads = [each.reshape(*each.shape[:2], num_heads, -1).permute(1, 2, 0, 3) for each in projected]
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _merged_mask(attn_mask, key_padding_mask, heads[0], heads[1])
    out, weights = _attended(heads, mask, dropout_p if training else 0.0, causal, need_weights)
    out = out.permute(2, 0, 1, 3).flatten(2)
    out = mapped(out, out_proj_weight, out_proj_bias, F.linear, 0, sequence_dim=sequence_dim)
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    if not batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _for_queries(value: Tensor, query: Tensor, shard: ShardTensor, place: int) -> Tensor:
    """The keys or values that a rank's queries need; query heads may share them in groups."""
    if (
        isinstance(value, ShardTensor)
        and value._segments == shard._segments
        and value._local.dim() - value._dim == place
    ):
        return value._local
    alike = value.dim() < place or value.shape[-place] == query.shape[-place]
    if isinstance(value, ShardTensor) and place == _HEADS and value._dim == value.dim() - 2:
        # Made by a whole weight from a sequence that is cut.
        return _own_heads(whole_sequence(value), query, shard)
    if alike or place != _HEADS:
        own: Tensor = own_operand(value, shard)
        return own
    if not isinstance(value, ShardTensor):
        return _own_heads(entered(value, shard._group), query, shard)
    if value._dim != value.dim() - place or not (_one_even_run(value) and _one_even_run(shard)):
        raise Unshardable("queries and keys are cut in different ways")
    return value._local


def _own_heads(value: Tensor, query: Tensor, shard: ShardTensor) -> Tensor:
    """A rank's keys or values of which all are known."""
    group, count, shared = shard._group, query.shape[-_HEADS], value.shape[-_HEADS]
    if shared == 1:
        return value
    if shared == count:
        return take(value, value.dim() - _HEADS, shard._segments, group.rank, group.size)
    if not _one_even_run(shard):
        raise Unshardable("query heads share keys and are cut in several segments or in uneven parts")
    own, sharing = count // group.size, count // shared
    first = group.rank * own
    if own % sharing == 0 or sharing % own == 0:
        return value.narrow(-_HEADS, first // sharing, max(own // sharing, 1))
    heads = torch.arange(first, first + own, device=value.device) // sharing
    return value.index_select(-_HEADS, heads)


def _one_even_run(shard: ShardTensor) -> bool:
    return len(shard._segments) == 1 and not shard.uneven


def _one_batch(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sequences without a batch, as a batch of one; one that is given twice stays one."""
    own_query = query.unsqueeze(1)
    own_key = own_query if key is query else key.unsqueeze(1)
    own_value = own_key if value is key else value.unsqueeze(1)
    return own_query, own_key, own_value, None if padding is None else padding.unsqueeze(0)


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: tuple[Tensor | None, ...], bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    if len(weights) == 1 and query is key and key is value:
        assert weights[0] is not None
        out = F.linear(query, weights[0], bias)
        parts: tuple[Tensor, ...] = out.split(out.shape[-1] // 3, -1)
        return parts
    if len(weights) == 1:
        assert weights[0] is not None
        weights = weights[0].split(weights[0].shape[0] // 3, 0)
    biases = (None, None, None) if bias is None else bias.split(bias.shape[0] // 3, 0)
    inputs = zip((query, key, value), weights, biases, strict=True)
    return tuple(F.linear(each, weight, own_bias) for each, weight, own_bias in inputs if weight is not None)


def _merged_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What is added to the scores, as (batches, heads, queries, keys) or what is broadcast to it."""
    batches, heads, queries, _ = query.shape
    keys = key.shape[-2]
    added = None if mask is None else _added(mask, query.dtype)
    if added is not None:
        added = added[None, None] if added.dim() == 2 else added.view(batches, heads, queries, keys)
    if padding is None:
        return added
    of_keys = _added(padding, query.dtype).view(batches, 1, 1, keys)
    return of_keys if added is None else added + of_keys


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _attended(
    heads: list[Tensor], mask: Tensor | None, p: float, is_causal: bool, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """The result of each head, and the weights if they are asked for."""
    query, key, value = heads
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, p, is_causal), None
    scores = (query * math.sqrt(1 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
    if p:
        weights = F.dropout(weights, p)
    return weights @ value, weights
