"""A group of one process and a small block on shards, twice: replayed, and as it is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.graph.calls import around_forward
from lightning_3d.parallel.tensor.replay.block import Replay, ReplayOptions
from lightning_3d.parallel.tensor.replay.blocks import Replays
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join

WIDTH = 8


class MirrorGroup(ShardGroup):
    """Two ranks of which the other one has the same parts as this one."""

    def __init__(self) -> None:
        super().__init__(2, 0)

    def sum(self, value: Tensor) -> Tensor:
        return value * 2

    def max(self, value: Tensor) -> Tensor:
        return value.clone()

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        return join((part, part), dim, segments)

    def sum_part(self, value: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> MirrorGroup:
        return self


class CountingGroup(MirrorGroup):
    """Counts its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def sum(self, value: Tensor) -> Tensor:
        self.sums += 1
        return super().sum(value)


class Block(nn.Module):
    """A multi-layer perceptron whose weights are cut, beside what a test adds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.group: ShardGroup = MirrorGroup()
        self.up_weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.down_weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.norm = nn.LayerNorm(WIDTH)
        self.rate = 0.0
        self.history: list[int] = []

    @property
    def up(self) -> Shard:
        return Shard(self.up_weight, 0, (2 * WIDTH,), self.group)

    @property
    def down(self) -> Shard:
        return Shard(self.down_weight, 1, (2 * WIDTH,), self.group)

    def core(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


def read(module: nn.Module, name: str) -> Tensor:
    """Parameters of toys are plain."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def replayed(module: nn.Module, group: ShardGroup, **options: Any) -> Replay:
    """Has a module replayed."""
    replay = Replay(module, group, read=read, name="block", options=ReplayOptions(**options))
    around_forward(module, replay.handle)
    return replay


Forward = Callable[..., Any]


def block_with(forward: Forward) -> Block:
    """Returns a block whose forward is a function of a block and its inputs."""
    return type("Block", (Block,), {"forward": forward})()


class Twins:
    """Two equal blocks, one of them replayed, that must agree to the bit in results and gradients.

    Args:
        module: A block; its twin is a copy.
        options: Of the replay.
    """

    def __init__(self, module: Block, **options: Any) -> None:
        self.plain, self.module = copy.deepcopy(module), module
        self.replay = replayed(module, module.group, **options)

    def change(self, change: Callable[[Any], object]) -> None:
        """Does the same to both."""
        change(self.module)
        change(self.plain)

    def call(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        """Calls both with the same random numbers and compares."""
        ones, others = (self._run(module, args, kwargs, seed) for module in (self.module, self.plain))
        assert len(ones) == len(others)
        for one, other in zip(ones, others, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)

    def _run(self, module: Block, args: Any, kwargs: Any, seed: int) -> list[Tensor | None]:
        torch.manual_seed(seed)
        random.seed(seed)
        known = {id(value): _fresh(value) for value in args if isinstance(value, Tensor)}
        tensors = [known.get(id(value), value) for value in args]
        module.zero_grad()
        found = [result for result in flat(module(*tensors, **kwargs)) if isinstance(result, Tensor)]
        wanted = [result for result in found if result.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(result) for result in wanted])
        leaves = [*(value for value in tensors if isinstance(value, Tensor)), *module.parameters()]
        return [*(result.detach() for result in found), *(leaf.grad for leaf in leaves), torch.rand(1)]


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def flat(result: Any) -> list[Any]:
    """Returns the leaves of a result; of shards the local parts."""
    if isinstance(result, Shard):
        return [result._local]
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in flat(item)]
    if isinstance(result, dict):
        return flat(list(result.values()))
    return [result]


def inputs(count: int, steps: int = 4) -> list[Tensor]:
    """Returns different inputs of one shape."""
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(2, steps, WIDTH, generator=generator).requires_grad_() for _ in range(count)]


def install(replays: Replays, blocks: Mapping[str, nn.Module]) -> None:
    """Has every call of a block's ``forward`` replayed."""
    for name, block in blocks.items():
        around_forward(block, replays.handler(name))
