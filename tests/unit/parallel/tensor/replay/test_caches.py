"""Caches of Hugging Face models in training: filled by a replayed block as by the block itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lightning_3d.parallel.tensor.replay.caches import fresh_layer
from tests.unit.parallel.tensor.replay.toys import WIDTH, Block, block_with, flat, inputs, replayed


def attend(block: Any, x: Tensor, cache: Any = None) -> Tensor:
    batch, steps, _ = x.shape
    heads = F.linear(x, block.up).view(batch, steps, 4, WIDTH // 2).transpose(1, 2)
    keys, values = cache.update(heads, heads.sin(), 1, kwargs={"unused": x})
    mixed = (heads @ keys.transpose(-2, -1)).softmax(-1) @ values
    return F.linear(mixed.transpose(1, 2).reshape(batch, steps, -1), block.down)


def contents(cache: DynamicCache) -> list[Tensor]:
    return [part for layer in cache.layers if layer.is_initialized for part in flat([layer.keys, layer.values])]


def run(block: Block, x: Tensor, cache: DynamicCache) -> list[Tensor]:
    block.zero_grad()
    y = block(x, cache=cache)
    y.sum().backward()
    assert block.up_weight.grad is not None
    return [y.detach(), block.up_weight.grad, *contents(cache)]


def test_a_fresh_cache_is_filled_once_at_each_call() -> None:
    block, plain = block_with(attend), block_with(attend)
    replay = replayed(block, block.group, check_every=3)
    for x in inputs(9):
        results = [run(each, x, DynamicCache()) for each in (block, plain)]
        assert len(results[0]) == 4
        assert all(map(torch.equal, *results))
        assert type(DynamicCache()) is DynamicCache
    assert replay.report().replayed


def test_a_cache_that_is_filled_runs_as_it_is() -> None:
    block, plain = block_with(attend), block_with(attend)
    replay = replayed(block, block.group)
    for x in inputs(3):
        run(block, x, DynamicCache())
    caches = DynamicCache(), DynamicCache()
    for x in inputs(3):
        with torch.no_grad():
            ones, others = ([each(x, cache=c), *contents(c)] for each, c in zip((block, plain), caches, strict=True))
        assert all(map(torch.equal, ones, others))
    assert contents(caches[0])[0].shape[-2] == 12
    assert "not empty" in str(replay._reason)
    for x in inputs(3):
        run(block, x, DynamicCache())
    assert replay.report().replayed


def read_length(block: Any, x: Tensor, cache: Any = None) -> Tensor:
    return block.core(x) + cache.get_seq_length()


def ignore(block: Any, x: Tensor, cache: Any = None) -> Tensor:
    return block.core(x)


@pytest.mark.parametrize(
    ("forward", "cache", "reason"),
    [
        (read_length, DynamicCache, "it reads .get_seq_length of a DynamicCache"),
        (ignore, lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "cache is an EncoderDecoderCache"),
    ],
    ids=["read", "other kind"],
)
def test_other_uses_are_not_replayed(forward: Any, cache: Callable[[], Any], reason: str) -> None:
    block = block_with(forward)
    replay = replayed(block, block.group)
    given = cache()
    kind = type(given)
    for x in inputs(3):
        block(x, cache=given)
    assert type(given) is kind
    assert reason in str(replay.report())


def test_fresh_layers() -> None:
    cache = DynamicCache()
    assert fresh_layer(cache, 0) == "DynamicLayer"
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    assert fresh_layer(cache, 0) is None
    assert fresh_layer(cache, 1) == "DynamicLayer"
