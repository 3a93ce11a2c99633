"""Step times of the data axis beside what people use today: `python -m tests.benchmarks.data_axis`.

Two processes (one for the single-device pair); in each, the two loops take turns step by step. Both sides train the
same model on the same batches with AdamW and clipping by norm. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from lightning_3d.reference.gpt import GPT
from tests.benchmarks.paired import HEADER, Comparison, Side, Turns
from tests.spmd.pool import run_spmd

VOCABULARY, LENGTH, SAMPLES, CLIP, RATE = 256, 128, 8, 1.0, 1e-3
WARM_UP = 10


class Model(L.LightningModule):
    """A small GPT in a plain LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(vocab_size=VOCABULARY, hidden_size=192, num_layers=4, num_heads=6, max_length=LENGTH)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model, ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(rank: int, count: int) -> list[Tensor]:
    """Batches of one rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(count)]


def lightning_loop(strategy: Strategy, rank: int, world: int) -> Callable[[Side], None]:
    """Returns a loop that is a Trainer with some strategy."""

    def loop(side: Side) -> None:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            max_epochs=1,
            gradient_clip_val=CLIP,
            callbacks=[side.callback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        data: Any = batches(rank, side.turns.steps)
        trainer.fit(Model(), DataLoader(data, batch_size=None))

    return loop


def fsdp_loop(rank: int, world: int) -> Callable[[Side], None]:
    """Returns a hand-written loop around torch's fully_shard, blocks and root, as its documentation shows."""

    def loop(side: Side) -> None:
        model = Model().model
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        for ids in batches(rank, side.turns.steps):
            loss_of(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            side.step_ended()

    return loop


def measure(rank: int, world: int, name: str, steps: int) -> list[tuple[float, float, float, float]]:
    """Runs one comparison on this rank and returns the times of its steps."""
    turns = Turns(steps + WARM_UP, WARM_UP)
    loops: dict[str, Callable[[], tuple[Callable[[Side], None], Callable[[Side], None]]]] = {
        "single": lambda: (
            lightning_loop(Mesh3DStrategy(), rank, world),
            lightning_loop(SingleDeviceStrategy(device=torch.device("cpu")), rank, world),
        ),
        "ddp": lambda: (
            lightning_loop(Mesh3DStrategy(zero_stage=0), rank, world),
            lightning_loop(DDPStrategy(), rank, world),
        ),
        "fsdp": lambda: (lightning_loop(Mesh3DStrategy(zero_stage=3), rank, world), fsdp_loop(rank, world)),
    }
    turns.run(loops[name]())
    if dist.is_initialized():
        dist.barrier()
    return turns.times()


COMPARISONS = {
    "ddp": ("zero_stage=0, Lightning's DDPStrategy", 2, 1.00),
    "fsdp": ("zero_stage=3, hand-written FSDP2 loop", 2, 1.00),
    "single": ("one process, Lightning's SingleDeviceStrategy", 1, 1.02),
}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=121, help="timed steps of each loop")
    parser.add_argument("--only", choices=COMPARISONS, help="one comparison")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for name, (title, world, target) in COMPARISONS.items():
        if options.only in (None, name):
            rows = run_spmd(measure, world, name, options.steps, timeout=600)[0]
            print(Comparison(title, target, rows).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
