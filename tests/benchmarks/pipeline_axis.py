"""Step times of the pipeline axis beside a loop written by hand: `python -m tests.benchmarks.pipeline_axis`.

Two gloo processes, two stages; in each process a Trainer with our strategy and a hand-split loop around one of
torch.distributed.pipelining's schedules take turns step by step: the same GPT, schedule, micro-batches, AdamW and
clipping by norm. Times are those of the first rank, whose backward ends last. What weighs at small sizes is the
Trainer's own work in each step, and small messages: the last stage tells the others what the step returned.
Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from lightning_3d import Mesh3DStrategy
from lightning_3d.reference.gpt import GPT
from tests.benchmarks.loops import CLIP, RATE, loader, trainer_of
from tests.benchmarks.paired import HEADER, Comparison, Side, Turns
from tests.spmd.pool import run_spmd

VOCABULARY, STAGES, WARM_UP = 256, 2, 5
TARGET = 1.03


@dataclass(frozen=True)
class Size:
    """How large the model and its batches are."""

    name: str
    width: int
    layers: int
    length: int
    samples: int
    microbatches: int
    steps: int

    def model(self) -> GPT:
        """Builds the model, its head not tied: the loop by hand needs no sum over stages."""
        torch.manual_seed(0)
        heads = self.width // 32
        return GPT(VOCABULARY, self.width, self.layers, heads, max_length=self.length, tie_weights=False)

    def batches(self, count: int) -> list[Tensor]:
        """Returns token ids."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.samples, self.length + 1)
        return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(count)]


SIZES = (
    Size("tiny", width=64, layers=4, length=32, samples=8, microbatches=4, steps=201),
    Size("small", width=192, layers=4, length=128, samples=8, microbatches=4, steps=121),
    Size("medium", width=512, layers=4, length=128, samples=8, microbatches=4, steps=41),
)


class Model(L.LightningModule):
    """The model in a plain LightningModule."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = size.model()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model(ids[:, :-1]), ids[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


class FirstHalf(nn.Module):
    """Embeddings and the first half of the blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.token_embedding, model.position_embedding
        self.blocks = nn.Sequential(*model.blocks[: len(model.blocks) // 2])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        hidden: Tensor = self.blocks(x)
        return hidden


class SecondHalf(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*model.blocks[len(model.blocks) // 2 :])
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def ours(size: Size, schedule: str) -> Callable[[Side], None]:
    """Returns a loop that is a Trainer with our strategy."""

    def loop(side: Side) -> None:
        strategy = Mesh3DStrategy(
            pipeline_parallel_size=STAGES, num_microbatches=size.microbatches, pipeline_schedule=schedule
        )
        trainer_of(strategy, STAGES, [side.callback()]).fit(Model(size), loader(size.batches(side.turns.steps)))

    return loop


def by_hand(size: Size, schedule: str, rank: int) -> Callable[[Side], None]:
    """Returns a hand-written loop around one of torch's schedules, as its documentation shows."""

    def loop(side: Side) -> None:
        model = size.model()
        part = SecondHalf(model) if rank else FirstHalf(model)
        group = dist.new_group(list(range(STAGES)))
        stage = PipelineStage(part, rank, STAGES, torch.device("cpu"), group=group)
        runner: Any = get_schedule_class(schedule)(stage, size.microbatches, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(part.parameters(), lr=RATE)
        for ids in size.batches(side.turns.steps):
            if rank:
                runner.step(target=ids[:, 1:], losses=[], return_outputs=False)
            else:
                runner.step(ids[:, :-1], return_outputs=False)
            _clip(part, group)
            optimizer.step()
            optimizer.zero_grad()
            side.step_ended()

    return loop


def _clip(part: nn.Module, group: dist.ProcessGroup | None) -> None:
    norm = nn.utils.get_total_norm([each.grad for each in part.parameters() if each.grad is not None])
    total = norm.square()
    dist.all_reduce(total, group=group)
    nn.utils.clip_grads_with_norm_(part.parameters(), CLIP, total.sqrt())


def measure(rank: int, world: int, size: Size, schedule: str, steps: int) -> list[tuple[float, float, float, float]]:
    """Runs one comparison on this rank and returns the times of its steps."""
    turns = Turns(steps + WARM_UP, WARM_UP)
    turns.run((ours(size, schedule), by_hand(size, schedule, rank)))
    dist.barrier()
    return turns.times()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="timed steps of each loop; by default as many as the size needs")
    parser.add_argument("--size", choices=[size.name for size in SIZES], help="one size")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), help="one schedule")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for size in SIZES:
        for schedule in ("gpipe", "1f1b"):
            if options.size in (None, size.name) and options.schedule in (None, schedule):
                rows = run_spmd(measure, STAGES, size, schedule, options.steps or size.steps, timeout=900)[0]
                title = f"pipeline 2, {size.name}, {schedule}, hand-split torch.distributed.pipelining"
                print(Comparison(title, TARGET, rows).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
