"""Memory while training: what was predicted beside what is there."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.log import get_logger
from lightning_3d.mesh.spec import PIPELINE_AXIS
from lightning_3d.units import format_bytes

_log = get_logger(__name__)


class MemoryMonitor(Callback):
    """Compares the most bytes of this rank's tensors with a prediction, and logs both.

    On an accelerator the bytes are those of torch's allocator (``max_memory_allocated``), the high-water mark since
    training began. On the CPU torch keeps no such number: the growth of the process' largest resident memory since
    then stands for it, which counts what is no tensor too.

    Logs ``memory/measured_bytes`` and, with a prediction, ``memory/predicted_bytes`` and
    ``memory/measured_to_predicted``, those of rank 0; Lightning's loggers write nothing of other ranks. A rank that
    needs more than was predicted says so itself, whichever it is.

    Args:
        predicted_bytes: What a rank is expected to need: a number, such as the peak that ``lightning-3d dryrun``
            prints, or one for each pipeline rank.
        every_n_steps: Optimizer steps between two looks.
        tolerance: A measurement beyond ``predicted_bytes * (1 + tolerance)`` is told once, by each rank that has one.

    Raises:
        ConfigError: A number is not positive.
    """

    def __init__(
        self,
        predicted_bytes: float | list[float] | None = None,
        every_n_steps: int = 50,
        tolerance: float = 0.1,
    ) -> None:
        numbers = predicted_bytes if isinstance(predicted_bytes, list) else [predicted_bytes]
        if any(number is not None and not number > 0 for number in numbers):
            raise ConfigError(f"MemoryMonitor(predicted_bytes={predicted_bytes}) is no memory.", valid="bytes above 0")
        if every_n_steps < 1:
            raise ConfigError(f"MemoryMonitor(every_n_steps={every_n_steps}) never looks.", valid="1 or more")
        self.predicted_bytes = predicted_bytes
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.measured_bytes = 0
        self._resident = 0
        self._told = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told = False
        self._resident = _resident_bytes()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == 0 or step % self.every_n_steps or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self.measured_bytes = self._measured(pl_module.device)
        predicted = self._predicted(trainer)
        values = {"memory/measured_bytes": float(self.measured_bytes)}
        if predicted is not None:
            values["memory/predicted_bytes"] = predicted
            values["memory/measured_to_predicted"] = self.measured_bytes / predicted
            self._tell(predicted, trainer.global_rank)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    def _predicted(self, trainer: Trainer) -> float | None:
        found = self.predicted_bytes
        if not isinstance(found, list):
            return found
        mesh: Any = getattr(trainer.strategy, "device_mesh", None)
        rank = 0 if mesh is None else mesh.get_local_rank(PIPELINE_AXIS)
        if rank >= len(found):
            raise ConfigError(
                f"MemoryMonitor has {len(found)} predictions, and this is pipeline rank {rank}.",
                valid="one number, or one for each pipeline rank",
            )
        return found[rank]

    def _measured(self, device: torch.device) -> int:
        if device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(device))
        return max(_resident_bytes() - self._resident, 0)

    def _tell(self, predicted: float, rank: int) -> None:
        if self._told or self.measured_bytes <= predicted * (1 + self.tolerance):
            return
        self._told = True
        _log.warning(
            "memory of rank %d: %s measured, %s predicted (%+.0f%%)",
            rank,
            format_bytes(self.measured_bytes),
            format_bytes(predicted),
            100 * (self.measured_bytes / predicted - 1),
        )


def _resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    # Linux counts in KiB, macOS in bytes.
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
