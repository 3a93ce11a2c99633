"""Speed while training: tokens (or samples) per second over all data ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.log import get_logger
from lightning_3d.units import format_count

_log = get_logger(__name__)


class Throughput(Callback):
    """Prints step, progress-bar metrics and speed on rank 0, and gives the speed to the loggers.

    Validation does not count as training time, waiting for data does. The first batch, which warms up, is left out.

    Args:
        every_n_steps: Optimizer steps between two prints.
        tokens_per_sample: Length of a sequence, to count tokens; None counts samples.
    """

    def __init__(self, every_n_steps: int = 10, tokens_per_sample: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self.unit = "samples" if tokens_per_sample is None else "tokens"
        self._per_sample = tokens_per_sample or 1
        self._window = _Pace()
        self._whole = _Pace()
        self._since: float | None = None
        self._printed_step = 0

    @property
    def per_second(self) -> float:
        """Average speed of the training so far, over all data ranks."""
        return self._whole.per_second

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window, self._whole, self._since = _Pace(), _Pace(), None
        self._printed_step = trainer.global_step

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._since is not None and batch_idx > 0:
            count = extract_batch_size(batch) * self._per_sample * _data_ranks(trainer)
            for pace in (self._window, self._whole):
                pace.add(count, now - self._since)
        self._since = now
        step = trainer.global_step
        if step > self._printed_step and step % self.every_n_steps == 0:
            self._printed_step = step
            self._show(trainer, f"step {step}", self._window.per_second)
            self._window = _Pace()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, f"trained to step {trainer.global_step}", self.per_second)

    def _show(self, trainer: Trainer, title: str, speed: float) -> None:
        # Read on every rank: a metric may need all of them for its value.
        shown = trainer.progress_bar_metrics
        if not trainer.is_global_zero:
            return
        values = (f"{name} {float(value):.4f}" for name, value in shown.items())
        _log.info("%s", "  ".join([title, *values, f"{format_count(speed)} {self.unit}/s"]))
        for logger in trainer.loggers:
            logger.log_metrics({f"{self.unit}_per_second": speed}, step=trainer.global_step)


@dataclass(slots=True)
class _Pace:
    """A count and the seconds that it took."""

    count: float = 0.0
    seconds: float = 0.0

    def add(self, count: float, seconds: float) -> None:
        self.count += count
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0


def _data_ranks(trainer: Trainer) -> int:
    if not isinstance(trainer.strategy, ParallelStrategy):
        return 1
    return int((trainer.strategy.distributed_sampler_kwargs or {}).get("num_replicas", 1))
