"""Idle time of measured pipeline steps beside the formula's: `python -m tests.benchmarks.pipeline_bubble`.

Two gloo processes, two stages of equal blocks without a head; a Trainer with our strategy, whose every step is timed.
The formula is (p - 1) / (m + p - 1) for p stages and m micro-batches, of GPipe and 1F1B. A step in which other work of
the machine got between the computations waited longer than it should; so beside the measured times there is what the
schedule waits when each computation takes the CPU time that it took. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn

from lightning_3d import Mesh3DStrategy
from lightning_3d.config.schema import ONE_STAGE_SCHEDULES
from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.parallel.pipeline.schedule.stopwatch import Stopwatch
from lightning_3d.parallel.pipeline.schedule.timeline import Timeline
from tests.benchmarks.loops import loader, trainer_of
from tests.spmd.pipeline_nets import ideal_bubble
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


@dataclass(frozen=True)
class Times:
    """What one rank has measured.

    Attributes:
        timelines: Of all ranks, step by step.
        cpu: CPU seconds of this rank's computations, by kind.
    """

    timelines: list[Timeline] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """Context in which the CPU time of what a stopwatch is held to is taken too."""
        over = Stopwatch.over

        @contextmanager
        def both(stopwatch: Stopwatch, action: Action) -> Iterator[None]:
            start = time.thread_time()
            with over(stopwatch, action):
                yield
            self.cpu.setdefault(action.kind, []).append(time.thread_time() - start)

        with mock.patch.object(Stopwatch, "over", both):
            yield

    @property
    def of_stage(self) -> StageTimes:
        """The medians."""
        forward, backward = (statistics.median(self.cpu[kind]) for kind in "FB")
        return StageTimes(forward=forward, backward_input=backward, backward_weight=0.0)


class Timelines(L.Callback):
    """Times every step."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.start_pipeline_timeline()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self._times.timelines.append(strategy.stop_pipeline_timeline().measured)


def measure(rank: int, world: int, schedule: str, microbatches: int, steps: int) -> Times:
    """Returns the times of a training."""
    times = Times()
    strategy = Mesh3DStrategy(pipeline_parallel_size=RANKS, num_microbatches=microbatches, pipeline_schedule=schedule)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(microbatches * SAMPLES, 4, WIDTH, generator=generator)
    data = [batch] * (steps + WARM_UP)
    with times.clocks():
        trainer_of(strategy, world, [Timelines(times)]).fit(Blocks(), loader(data))
    del times.timelines[:WARM_UP]
    return times


@dataclass(frozen=True)
class Row:
    """Bubbles of one training.

    Attributes:
        schedule: The schedule.
        microbatches: Micro-batches of a batch.
        measured: What each step waited.
        played: What the schedule waits with the CPU times of its computations.
    """

    schedule: str
    microbatches: int
    measured: list[float]
    played: float

    def line(self) -> str:
        """Returns a row of a Markdown table."""
        wanted = ideal_bubble(RANKS, self.microbatches)
        off = statistics.quantiles([abs(found - wanted) for found in self.measured], n=4)
        low, middle, high = statistics.quantiles(self.measured, n=4)
        met = "yes" if off[0] <= CLOSE else "no"
        return (
            f"| {self.schedule} | {self.microbatches} | {wanted:.1%} | "
            f"{low:.1%} / {middle:.1%} / {high:.1%} | {off[0]:.1%} / {off[1]:.1%} / {off[2]:.1%} | {met} | "
            f"{self.played:.1%} | {'yes' if abs(self.played - wanted) <= CLOSE else 'no'} |"
        )


HEADER = (
    "| schedule, pipeline 2 | m | formula | measured (quartiles) | off by | within 3 | by CPU times | within 3 |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=31, help="timed steps of each training")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for schedule in ONE_STAGE_SCHEDULES:
        for count in (2, 4, 8):
            found = run_spmd(measure, RANKS, schedule, count, options.steps, timeout=600)
            stages = [times.of_stage for times in found]
            played = simulate(schedule, ranks=RANKS, microbatches=count, times=stages).bubble
            print(Row(schedule, count, [each.bubble for each in found[0].timelines], played).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
