"""Random numbers of shards: each rank's own, from one integer that all ranks draw alike.

The integer comes from the default generator of the CPU, which is equal on all ranks of a group and stays so. Whatever
saves and restores that generator (activation checkpointing, a checkpoint) replays the random numbers of every rank, and
there is no state of a rank to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.protocol import one_call

Segments = tuple[int, ...]


@one_call
def random_part(value: Tensor, group: ShardGroup, function: Callable[..., Tensor], *args: object) -> Tensor:
    """Returns ``function(value, *args)`` with random numbers of this rank's own.

    Args:
        value: This rank's part.
        group: The ranks.
        function: Draws from the default generator of the tensor's device.
        args: Its further arguments.
    """
    with own_numbers(value, group):
        return function(value, *args)


@one_call
def dropout_part(
    value: Tensor, group: ShardGroup, p: float, dim: int, segments: Segments, stride: tuple[int, ...]
) -> Tensor:
    """Returns `torch.nn.functional.dropout` of this rank's part.

    Args:
        value: This rank's part.
        group: The ranks.
        p: Share of elements that become zero.
        dim: The dim that is cut.
        segments: Its global lengths.
        stride: Of the whole: the order in which one device draws, for exact random numbers.
    """
    if not group.options.exact_random:
        with own_numbers(value, group):
            return F.dropout(value, p)
    shape = list(value.shape)
    shape[dim] = sum(segments)
    return value * _own_mask(value, group, p, dim, segments, shape, stride)


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    group: ShardGroup,
    dim: int,
    segments: Segments,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Returns `torch.nn.functional.scaled_dot_product_attention` of this rank's part, with dropout.

    Args:
        query: This rank's part.
        key: This rank's part.
        value: This rank's part.
        mask: This rank's part.
        group: The ranks.
        dim: The dim of the query that is cut.
        segments: Its global lengths.
        p: Share of attention weights that become zero.
        is_causal: As in torch.
        scale: As in torch.
        enable_gqa: As in torch.
    """
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if has_torch_function(tensors):
        args = (query, key, value, mask, group, dim, segments, p, is_causal, scale, enable_gqa)
        handled: Tensor = handle_torch_function(attention_with_dropout, tensors, *args)
        return handled
    if not group.options.exact_random:
        with own_numbers(query, group):
            return F.scaled_dot_product_attention(
                query, key, value, mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    weights = _attention_weights(query, key, mask, is_causal, scale)
    shape = list(weights.shape)
    shape[dim] = sum(segments)
    own = _own_mask(weights, group, p, dim, segments, shape, None)
    return (weights * own) @ _like_heads(value, query)


@contextmanager
def own_numbers(value: Tensor, group: ShardGroup) -> Iterator[None]:
    """Lets the default generator of a tensor's device give this rank's own random numbers, and puts it back.

    Args:
        value: A tensor on the device.
        group: The ranks.
    """
    if isinstance(value, FakeTensor):
        yield
        return
    # Never torch.manual_seed: it seeds the generators of all devices.
    drawn = int(torch.empty((), dtype=torch.int64).random_())
    generator = default_generator(value.device)
    state = generator.get_state()
    generator.manual_seed(_mixed(drawn, group.rank))
    try:
        yield
    finally:
        generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """Returns what torch draws from on a device if it is given no generator; the CPU's where a backend shows none."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    backend = torch.get_device_module(device)
    if not hasattr(backend, "default_generators"):
        return torch.default_generator
    ordinal: int | None = device.index
    index = backend.current_device() if ordinal is None else ordinal
    generator: torch.Generator = backend.default_generators[index]
    return generator


def _mixed(drawn: int, rank: int) -> int:
    """A seed in which every bit depends on all bits of both: the CPU's generator takes 32 of them."""
    bits = (drawn + (rank + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def _own_mask(
    part: Tensor,
    group: ShardGroup,
    p: float,
    dim: int,
    segments: Segments,
    shape: list[int],
    stride: tuple[int, ...] | None,
) -> Tensor:
    """This rank's part of the scaled mask that one device draws for the whole."""
    ones = torch.ones(shape, dtype=part.dtype, device=part.device)
    if stride is not None and all(stride):
        ones = torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device).fill_(1)
    return take(F.dropout(ones, p), dim, segments, group.rank, group.size)


def _attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The weights as torch computes them on the CPU when there is dropout."""
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (_like_heads(key, query) * root).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # A row that may look at nothing has weights of zero.
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _like_heads(value: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated for each query head that shares them."""
    if value.dim() < 3 or value.shape[-3] in (1, query.shape[-3]):
        return value
    return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
