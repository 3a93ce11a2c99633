"""Idle time of measured pipeline steps beside the formula's: `python -m tests.benchmarks.pipeline_bubble`.

Two gloo processes, two stages of equal blocks without a head; a Trainer with our strategy, whose every step is timed.
The formula is (p - 1) / (m + p - 1) for p stages and m micro-batches, of GPipe and 1F1B. Prints a Markdown table;
asserts nothing. A step in which other work of the machine got between the computations waited longer than it should.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from lightning_3d.config.schema import ONE_STAGE_SCHEDULES
from lightning_3d.parallel.pipeline.schedule.simulate import ideal_bubble
from lightning_3d.parallel.pipeline.schedule.timeline import Timeline
from tests.benchmarks.pipeline_axis import trainer_of
from tests.spmd.pool import run_spmd

RANKS, WARM_UP, CLOSE = 2, 3, 0.03
WIDTH, LAYERS, SAMPLES = 512, 4, 32


class Blocks(L.LightningModule):
    """Blocks alone, so that all stages take the same time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # The first stage goes back to its input too, as the others do.
        x = batch.clone().requires_grad_()
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Timelines(L.Callback):
    """Times every step."""

    def __init__(self) -> None:
        self.found: list[Timeline] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.start_pipeline_timeline()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.found.append(strategy.stop_pipeline_timeline().measured)


def measure(rank: int, world: int, schedule: str, microbatches: int, steps: int) -> list[Timeline]:
    """Returns the timelines of a training."""
    timelines = Timelines()
    strategy = Mesh3DStrategy(pipeline_parallel_size=RANKS, num_microbatches=microbatches, pipeline_schedule=schedule)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(microbatches * SAMPLES, 4, WIDTH, generator=generator)
    data: Any = [batch] * (steps + WARM_UP)
    trainer_of(strategy, [timelines]).fit(Blocks(), DataLoader(data, batch_size=None))
    return timelines.found[WARM_UP:]


@dataclass(frozen=True)
class Row:
    """Bubbles of one training.

    Attributes:
        schedule: The schedule.
        microbatches: Micro-batches of a batch.
        measured: What each waited.
    """

    schedule: str
    microbatches: int
    measured: list[float]

    def line(self) -> str:
        """Returns a row of a Markdown table."""
        wanted = ideal_bubble(RANKS, self.microbatches)
        off = statistics.quantiles([abs(found - wanted) for found in self.measured], n=4)
        low, middle, high = statistics.quantiles(self.measured, n=4)
        met = "yes" if off[0] <= CLOSE else "no"
        return (
            f"| {self.schedule} | {self.microbatches} | {wanted:.1%} | "
            f"{low:.1%} / {middle:.1%} / {high:.1%} | {off[0]:.1%} / {off[1]:.1%} / {off[2]:.1%} | {met} |"
        )


HEADER = (
    "| schedule, pipeline 2 | micro-batches | formula | measured (quartiles) | off by | within 3 points |\n"
    "|---|---|---|---|---|---|"
)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=31, help="timed steps of each training")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for schedule in ONE_STAGE_SCHEDULES:
        for count in (2, 4, 8):
            found = run_spmd(measure, RANKS, schedule, count, options.steps, timeout=600)[0]
            print(Row(schedule, count, [each.bubble for each in found]).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
