"""Whole steps on the tensor axis beside Lightning's ModelParallelStrategy: `python -m tests.benchmarks.tensor_trainer`.

Two gloo processes; in each, a Trainer with our strategy and the unmodified module takes turns step by step with a
Trainer whose module cuts itself for ModelParallelStrategy by torch's ColwiseParallel and RowwiseParallel: the same
blocks, batches and AdamW. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lightning_3d import Mesh3DStrategy
from tests.benchmarks.loops import RATE, Loop, loader, trainer_of
from tests.benchmarks.paired import HEADER, Comparison, Side, Turns
from tests.benchmarks.replay_cost import SIZES, Block, Size
from tests.benchmarks.tensor_axis import cut_by_styles
from tests.spmd.pool import run_spmd

WARM_UP = 10
TARGET = 1.00


class Stack(L.LightningModule):
    """A stack of blocks; cut by itself only for ModelParallelStrategy, which asks its users to write that."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size.width, size.head) for _ in range(size.blocks))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            for block in self.blocks:
                cut_by_styles(block, self.device_mesh["tensor_parallel"])

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def loop_of(strategy: Strategy, world: int, size: Size) -> Loop:
    """Returns a loop that is a Trainer with one of the two strategies."""

    def loop(side: Side) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (size.batch, size.steps, size.width)
        batches = [torch.randn(shape, generator=generator) for _ in range(side.turns.steps)]
        trainer_of(strategy, world, [side.callback()], clip=None).fit(Stack(size), loader(batches))

    return loop


def measure(rank: int, world: int, size: Size, steps: int) -> list[tuple[float, float, float, float]]:
    """Runs the comparison on this rank and returns the times of its steps."""
    turns = Turns(steps + WARM_UP, WARM_UP)
    theirs: Any = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=world)
    ours = Mesh3DStrategy(tensor_parallel_size=world)
    turns.run((loop_of(ours, world, size), loop_of(theirs, world, size)))
    dist.barrier()
    return turns.times()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="timed steps of each loop; by default 201 tiny, 61 medium ones")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for size in SIZES:
        steps = options.steps or (201 if size.name == "tiny" else 61)
        rows = run_spmd(measure, 2, size, steps, timeout=600)[0]
        title = f"tensor 2, {size.name}, Lightning's ModelParallelStrategy, hand-written plan"
        print(Comparison(title, TARGET, rows).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
