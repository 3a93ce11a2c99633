"""Speed while training: samples, tokens and operations per second, over all ranks of any mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.log import get_logger
from lightning_3d.plan.flops import sample_flops
from lightning_3d.strategy import Mesh3DStrategy
from lightning_3d.units import format_count, format_flops

_log = get_logger(__name__)

# A part of the Trainer's precision -> the dtype of its products as conf/cluster names it; and torch's name of that.
_DTYPES: Mapping[str, str] = {"bf16": "bf16", "16": "bf16", "64": "fp64", "transformer-engine": "bf16"}
_IN_TORCH: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Throughput(Callback):
    """Prints step, progress-bar metrics and speed on rank 0, and gives the speed to the loggers and the progress bar.

    Samples of a batch count once, however many ranks share it: ranks of the tensor and the pipeline axis work on the
    same ones. Validation does not count as training time, waiting for data does. The first batch, which warms up, is
    left out.

    Operations are those of the whole model, counted once in a run without values: three times the matrix products,
    convolutions and attention of a forward. TFLOP/s are of one device: of all, divided by the number of ranks. MFU is
    their share of the device's peak (Chowdhery et al. 2022, "PaLM", appendix B). Both are left out where nobody can
    count: under strategies of others that cut parameters, and where the step does not run without values.

    Args:
        every_n_steps: Optimizer steps between two prints.
        tokens_per_sample: Length of a sequence, to count tokens; None counts samples alone.
        flops: Count operations; costs one run of the step without values at the start.
        peak_flops: Operations per second of a device at its best, for MFU: a number, or numbers by "bf16", "fp32" and
            "fp64" as in conf/cluster, of which the Trainer's precision takes one. A GPU that Lightning knows has
            Lightning's figure in the place of those by dtype, and there is no MFU by one of these that a device
            exceeds: it is another device's. None: no MFU elsewhere.
        prog_bar: Show speed in Lightning's progress bar.

    Raises:
        ConfigError: A number is not positive.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        tokens_per_sample: int | None = None,
        flops: bool = True,
        peak_flops: float | Mapping[str, float] | None = None,
        prog_bar: bool = True,
    ) -> None:
        peaks = peak_flops.values() if isinstance(peak_flops, Mapping) else [peak_flops]
        numbers = (every_n_steps, tokens_per_sample, *peaks)
        if any(number is not None and not number > 0 for number in numbers):
            raise ConfigError(
                f"Throughput(every_n_steps={every_n_steps}, tokens_per_sample={tokens_per_sample}, "
                f"peak_flops={peak_flops}) measures nothing.",
                valid="numbers above 0",
            )
        self.every_n_steps = every_n_steps
        self.tokens_per_sample = tokens_per_sample
        self._counts = flops
        self._given_peak = peak_flops
        self._peak: float | None = None
        self._flops: float | None = None
        self._tried = False
        self._prog_bar = prog_bar
        self._window, self._whole = _Pace(), _Pace()
        self._since: float | None = None
        self._warm = False
        self._printed_step = 0

    @property
    def unit(self) -> str:
        """What is counted: "tokens", or "samples" where nobody said how long a sample is."""
        return "samples" if self.tokens_per_sample is None else "tokens"

    @property
    def per_second(self) -> float:
        """Average speed of the training so far over all data ranks, in tokens, or else in samples."""
        return self._whole.per_second * (self.tokens_per_sample or 1)

    @property
    def samples(self) -> float:
        """Samples of the training so far whose time was taken, over all data ranks."""
        return self._whole.samples

    @property
    def sample_flops(self) -> float | None:
        """Operations of the model in a forward and a backward of one sample; None where they are not counted."""
        return self._flops

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, Mesh3DStrategy):
            # Counted while the module is whole.
            trainer.strategy.counts_flops = self._counts and stage == TrainerFn.FITTING

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window, self._whole, self._since, self._warm = _Pace(), _Pace(), None, False
        self._printed_step = trainer.global_step
        self._flops = getattr(trainer.strategy, "sample_flops", None)
        self._tried = self._flops is not None
        self._peak = _peak(self._given_peak, pl_module.device, str(trainer.precision))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        whole = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if self._counts and not self._tried and whole:
            self._tried = True
            self._flops = sample_flops(pl_module, (batch, batch_idx))
        if self._since is None:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._since is not None and self._warm:
            samples = extract_batch_size(batch) * _data_ranks(trainer)
            for pace in (self._window, self._whole):
                pace.add(samples, now - self._since)
        self._since, self._warm = now, True
        step = trainer.global_step
        if step > self._printed_step and step % self.every_n_steps == 0:
            self._printed_step = step
            self._show(trainer, f"step {step}", self._window, pl_module if self._prog_bar else None)
            self._window = _Pace()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, f"trained to step {trainer.global_step}", self._whole, None)

    def speeds(self, samples_per_second: float, ranks: int) -> dict[str, float]:
        """Returns the values that loggers are given, by name.

        Args:
            samples_per_second: Of all data ranks.
            ranks: Devices that work on them.
        """
        found = {"samples_per_second": samples_per_second}
        if self.tokens_per_sample is not None:
            found["tokens_per_second"] = samples_per_second * self.tokens_per_sample
        if self._flops is not None:
            found["device_tflops"] = self._flops * samples_per_second / ranks / 1e12
            if self._peak is not None:
                found["mfu"] = found["device_tflops"] * 1e12 / self._peak
        return found

    def _show(self, trainer: Trainer, title: str, pace: _Pace, module: LightningModule | None) -> None:
        # Read on every rank: a metric may need all of them for its value.
        logged = {name: value for name, value in trainer.progress_bar_metrics.items() if name != self._bar_name}
        speeds = self.speeds(pace.per_second, trainer.world_size)
        if module is not None:
            module.log(self._bar_name, speeds[f"{self.unit}_per_second"], prog_bar=True, logger=False)
        if not trainer.is_global_zero:
            return
        if self._peak is not None and isinstance(self._given_peak, Mapping) and speeds.get("mfu", 0.0) > 1:
            # Nothing is faster than at its best.
            done, best = (format_flops(flops) for flops in (1e12 * speeds["device_tflops"], self._peak))
            _log.info("no MFU: a device does %s, and peak_flops, with %s, is of another one; see cluster", done, best)
            self._peak = None
            del speeds["mfu"]
        values = [f"{name} {float(value):.4f}" for name, value in logged.items()]
        _log.info("%s", "  ".join([title, *values, *_texts(speeds)]))
        for logger in trainer.loggers:
            logger.log_metrics(speeds, step=trainer.global_step)

    @property
    def _bar_name(self) -> str:
        return f"{self.unit}/s"


@dataclass(slots=True)
class _Pace:
    """Samples and the seconds that they took."""

    samples: float = 0.0
    seconds: float = 0.0

    def add(self, samples: float, seconds: float) -> None:
        self.samples += samples
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


def _texts(speeds: Mapping[str, float]) -> list[str]:
    units = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
    found = [f"{format_count(speeds[name])} {unit}" for name, unit in units.items() if name in speeds]
    if "device_tflops" in speeds:
        found.append(f"{format_flops(speeds['device_tflops'] * 1e12)} a device")
    if "mfu" in speeds:
        found.append(f"MFU {speeds['mfu']:.1%}")
    return found


def _peak(given: float | Mapping[str, float] | None, device: torch.device, precision: str) -> float | None:
    """The operations per second of this device at its best, in the precision of the run."""
    if given is not None and not isinstance(given, Mapping):
        return float(given)
    name = next((name for part, name in _DTYPES.items() if part in precision), "fp32")
    known = get_available_flops(device, getattr(torch, _IN_TORCH[name])) if device.type == "cuda" else None
    return known if known is not None or given is None else given.get(name)


def _data_ranks(trainer: Trainer) -> int:
    if not isinstance(trainer.strategy, ParallelStrategy):
        return 1
    return int((trainer.strategy.distributed_sampler_kwargs or {}).get("num_replicas", 1))
