"""Blocks with weights whose gradients are summed later: their programs hold plain operations only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lightning_3d.shards.partial import PartialTensor
from tests.unit.parallel.tensor.replay.toys import WIDTH, Block, CountingGroup, Twins, block_with, inputs, replayed

HEAD = WIDTH // 2


class MultiQuery(Block):
    """Four heads of queries that share one head of keys and values, which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.group = CountingGroup()
        self.key_weight, self.scale = nn.Parameter(torch.randn(HEAD, WIDTH)), nn.Parameter(torch.ones(HEAD))

    def partial(self, value: Tensor) -> PartialTensor:
        return PartialTensor(value, self.group)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        batch, steps, _ = x.shape
        queries = F.linear(x, self.up).view(batch, steps, 4, HEAD).transpose(1, 2)
        keys = F.linear(x, self.partial(self.key_weight))[:, None] * self.partial(self.scale)
        values = keys.sin()
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        mixed = F.scaled_dot_product_attention(queries, keys.expand(-1, 4, -1, -1), values.expand(-1, 4, -1, -1))
        return x + F.linear(mixed.transpose(1, 2).reshape(batch, steps, -1), self.down)


def test_keys_are_recorded_as_plain_values() -> None:
    module = MultiQuery()
    twins = Twins(module)
    for x in inputs(6):
        module.group.sums = 0
        twins.call(x)
        # Forward and backward, of both twins.
        assert module.group.sums == 4
    assert twins.replay.report().replayed
    (program,) = [entry.program for entry in twins.replay._entries]
    assert program is not None
    assert program.body.text.count("copy(") == 1
    assert "divided" not in program.body.text
    assert "PartialTensor" not in program.results_text


def test_caches_hold_what_they_would_hold() -> None:
    module, plain = MultiQuery(), MultiQuery()
    plain.load_state_dict(module.state_dict())
    replay = replayed(module, module.group, check_every=3)
    for x in inputs(9):
        caches = DynamicCache(), DynamicCache()
        for each, cache in zip((module, plain), caches, strict=True):
            each.zero_grad()
            each(x, cache=cache).sum().backward()
            assert isinstance(cache.layers[0].keys, PartialTensor)
        assert torch.equal(caches[0].layers[0].keys.value, caches[1].layers[0].keys.value)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs(module, plain))
    assert replay.report().replayed


def pairs(one: nn.Module, other: nn.Module) -> list[tuple[Any, Any]]:
    return [pair for pair in zip(one.parameters(), other.parameters(), strict=True) if pair[0].grad is not None]


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_parts_are_handed_partial_values_and_return_them(leaves: bool) -> None:
    def forward(block: Any, keys: Tensor) -> Tensor:
        scaled = block.norm(keys) * 2 + keys.cos()
        return scaled.share if leaves and isinstance(scaled, PartialTensor) else scaled

    block = block_with(forward)
    plain = type(block)()
    replay = replayed(block, block.group)
    for x in inputs(6):
        found = []
        for each in (block, plain):
            each.zero_grad()
            leaf = x.detach().requires_grad_()
            result = each(PartialTensor(leaf * 1, block.group))
            assert isinstance(result, PartialTensor) is not leaves
            (result.share if isinstance(result, PartialTensor) else result).sum().backward()
            found.append([leaf.grad, *(parameter.grad for parameter in each.norm.parameters())])
        assert all(map(torch.equal, *found))
    # A plain value of the same shape is another kind of input.
    block(inputs(1)[0])
    assert replay.report().replayed
    assert len(replay._entries) == 2
