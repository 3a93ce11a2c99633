"""Host cost of a replayed block beside a hand-written Megatron block: `python -m tests.benchmarks.replay_cost`.

One process on a fake process group of two ranks; CPU time, which other processes disturb little. Variants take turns
call by call. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.graph.calls import around_forward
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.parallel.tensor.replay.block import Replay
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ProcessShardGroup
from lightning_3d.shards.layout import Layout

RANKS = 2
COLUMNS = ("q", "k", "v", "gate", "up")
ROWS = ("o", "down")


class Norm(nn.Module):
    """Root-mean-square normalisation, in steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention and a gated MLP, as anybody writes them."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = (
            projection(x).view(batch, steps, width // self.head, self.head).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, steps, width))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Megatron(Block):
    """The same by hand: weights cut beforehand, local sizes, copies and sums where they belong."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        y = _Copy.apply(self.norm_2(x), self.group)
        hidden = F.silu(F.linear(y, self.gate.weight)) * F.linear(y, self.up.weight)
        return x + _Reduce.apply(F.linear(hidden, self.down.weight), self.group)

    def attend(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        x = _Copy.apply(x, self.group)
        q, k, v = (
            F.linear(x, projection.weight).view(batch, steps, -1, self.head).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _Reduce.apply(F.linear(y.transpose(1, 2).reshape(batch, steps, -1), self.o.weight), self.group)


class Cut(nn.Linear):
    """A linear layer that shows its plain local weight as a shard: what leaves cost is not in it."""

    cut: tuple[int, int]
    ranks: ProcessShardGroup

    def forward(self, x: Tensor) -> Tensor:
        dim, length = self.cut
        return F.linear(x, Shard(self.weight, dim, (length,), self.ranks))


@dataclass(frozen=True)
class Size:
    """How large blocks and inputs are."""

    name: str
    width: int
    head: int
    blocks: int
    batch: int
    steps: int
    calls: int


SIZES = (Size("tiny", 64, 16, 4, 2, 16, 201), Size("medium", 512, 64, 4, 4, 128, 15))


def layouts(size: Size) -> dict[str, Layout]:
    """Column and row cuts of one block."""
    block = Block(size.width, size.head)
    shapes = {name: block.get_submodule(name).weight.shape for name in (*COLUMNS, *ROWS)}
    dims = {name: 0 if name in COLUMNS else 1 for name in shapes}
    return {f"{name}.weight": Layout(dims[name], (shape[dims[name]],)) for name, shape in shapes.items()}


def by_hand(size: Size, mesh: DeviceMesh) -> nn.Module:
    """Returns hand-written blocks."""
    blocks = [Megatron(size.width, size.head) for _ in range(size.blocks)]
    for block in blocks:
        block.group = mesh.get_group()
        _cut(block, size)
    return nn.Sequential(*blocks)


def plain_parameters(size: Size, mesh: DeviceMesh) -> nn.Module:
    """Returns replayed blocks whose parameters are plain."""
    group = ProcessShardGroup(mesh.get_group())
    blocks = [Block(size.width, size.head) for _ in range(size.blocks)]
    for block in blocks:
        _cut(block, size)
        for name, layout in layouts(size).items():
            linear = block.get_submodule(name.removesuffix(".weight"))
            linear.__class__, linear.cut, linear.ranks = Cut, (layout.dim, layout.length), group
        replay = Replay(block, group, read=lambda module, name: module._parameters[name])
        around_forward(block, replay.handle)
    return nn.Sequential(*blocks)


def _cut(block: Block, size: Size) -> None:
    for name, layout in layouts(size).items():
        linear = block.get_submodule(name.removesuffix(".weight"))
        linear.weight = nn.Parameter(layout.part(linear.weight.detach(), 0, RANKS).contiguous())


def applied(size: Size, mesh: DeviceMesh, *, replayed: bool) -> tuple[nn.Module, TensorState, list[Replay]]:
    """Returns blocks whose parameters are DTensors, and what they are replayed by."""
    group = ProcessShardGroup(mesh.get_group())
    module = nn.Sequential(*(Block(size.width, size.head) for _ in range(size.blocks)))
    cuts = {f"{index}.{name}": layout for index in range(size.blocks) for name, layout in layouts(size).items()}
    state = apply_tensor(module, cuts, mesh, group, device=torch.device("cpu"))
    replays = [Replay(block, group, read=state.read) for block in module] if replayed else []
    for replay in replays:
        around_forward(replay.module, replay.handle)
    return module, state, replays


def measure(size: Size, mesh: DeviceMesh) -> None:
    """Prints a table of one size."""
    shards, shards_state, _ = applied(size, mesh, replayed=False)
    leaves, leaves_state, replays = applied(size, mesh, replayed=True)
    variants: dict[str, nn.Module] = {
        "by hand": by_hand(size, mesh),
        "replayed, plain parameters": plain_parameters(size, mesh),
        "replayed, leaves of DTensors": leaves,
        "shards": shards,
    }
    x = torch.randn(size.batch, size.steps, size.width, requires_grad=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with shards_state.activity, leaves_state.activity:
        first = _cpu(lambda: leaves(x))
        for index in range(size.calls + 4):
            for name in list(variants) if index % 2 else reversed(variants):
                taken = _step(variants[name], x)
                if index >= 4:
                    times[name].append(taken)
    print(f"\n**{size.name}: {size.blocks} blocks of width {size.width}, {size.batch} x {size.steps} tokens**\n")
    print(f"first call of all blocks {first * 1e3:.1f} ms; {replays[0].report()}\n")
    print("| variant | forward, µs per block | with backward | forward, ratio | with backward, ratio (quartiles) |")
    print("|---|---|---|---|---|")
    for name, taken in times.items():
        print(_line(name, size, taken, times["by hand"]))


def _line(name: str, size: Size, taken: list[tuple[float, float]], hand: list[tuple[float, float]]) -> str:
    forward, both = (statistics.median(pair[part] for pair in taken) / size.blocks * 1e6 for part in (0, 1))
    ratio = statistics.median(one[0] / other[0] for one, other in zip(taken, hand, strict=True))
    ratios = statistics.quantiles([one[1] / other[1] for one, other in zip(taken, hand, strict=True)], n=4)
    return f"| {name} | {forward:.0f} | {both:.0f} | {ratio:.2f} | {' / '.join(f'{each:.2f}' for each in ratios)} |"


def _step(module: nn.Module, x: Tensor) -> tuple[float, float]:
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    start = time.process_time()
    loss = module(x).pow(2).mean()
    middle = time.process_time()
    loss.backward()
    return middle - start, time.process_time() - start


def _cpu(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for each in SIZES:
        measure(each, init_device_mesh("cpu", (RANKS,)))
