"""Lightning's own callbacks that count ranks, or look at what one rank has: what each is told of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    ModelPruning,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor

from lightning_3d.batches.weights import LOSS
from lightning_3d.errors import BatchError, ModuleError
from lightning_3d.graph.calls import shadow
from lightning_3d.strategy.logging.collectives import DataCollectives
from lightning_3d.strategy.setup.summaries import WholeSummaries

# They decide by the loss of a batch, and one device's is that of all data ranks.
_JUDGE_LOSSES = (_LRCallback, SpikeDetection)
_ON_BATCH_END = "on_train_batch_end"


class CallbackDoors:
    """Makes callbacks of Lightning mean on a mesh what they mean on one device.

    Attributes:
        summaries: What the module was while it was whole.

    Args:
        collectives: Reductions over the data axis.
        model_group: The ranks that see the same samples.
    """

    def __init__(self, collectives: DataCollectives, model_group: dist.ProcessGroup) -> None:
        self.summaries = WholeSummaries()
        self._collectives = collectives
        self._model_group = model_group
        self._opened: dict[Callback, Callable[[], None]] = {}

    def open(self, trainer: Trainer) -> None:
        """Opens the doors of the Trainer's callbacks that have none yet."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, ThroughputMonitor):
                self._count_data_ranks(callback)
            elif callback not in self._opened:
                self._open(callback)

    def close(self) -> None:
        """The methods are the classes' own again."""
        while self._opened:
            self._opened.popitem()[1]()

    def _open(self, callback: Callback) -> None:
        if isinstance(callback, _JUDGE_LOSSES) and self._collectives.data.size() > 1:
            self._opened[callback] = shadow(callback, _ON_BATCH_END, partial(self._of_all, callback.on_train_batch_end))
        elif isinstance(callback, BasePredictionWriter) and self._model_group.rank() > 0:
            self._opened[callback] = _write_nothing(callback)
        elif isinstance(callback, ModelSummary) and (made := self.summaries.of(callback)) is not None:
            self._opened[callback] = shadow(callback, "_summary", lambda *_: made)

    def _of_all(
        self, judge: Callable[..., None], trainer: Trainer, module: LightningModule, outputs: Any, *rest: Any
    ) -> None:
        """Lets a callback judge the loss of all data ranks."""
        judge(trainer, module, self._with_mean_loss(outputs), *rest)

    def _with_mean_loss(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return self._collectives.reduce(outputs, None, "mean")
        if isinstance(outputs, Mapping) and isinstance(outputs.get(LOSS), Tensor):
            return {**outputs, LOSS: self._collectives.reduce(outputs[LOSS], None, "mean")}
        return outputs

    def _count_data_ranks(self, monitor: ThroughputMonitor) -> None:
        for stage, counts in monitor._throughputs.items():
            if not isinstance(counts, MeshThroughput):
                monitor._throughputs[stage] = MeshThroughput(
                    counts, data=self._collectives.data.size(), sharing=self._model_group.size()
                )


class MeshThroughput(Throughput):
    """Lightning's counts of work, of which several devices do one part together.

    Per second and for all devices: what one data rank does, times the data ranks. Per device: that, divided by all
    devices. Totals are those of a data rank, as on every mesh of Lightning's.

    Args:
        plain: Says what is kept and how it is named.
        data: Data ranks.
        sharing: Devices of each data rank.
    """

    def __init__(self, plain: Throughput, *, data: int, sharing: int) -> None:
        window = plain._time.maxlen
        super().__init__(plain.available_flops, world_size=data, window_size=window, separator=plain.separator)
        self._sharing = sharing

    def compute(self) -> dict[str, int | float]:
        """Returns the metrics under Lightning's names."""
        metrics = super().compute()
        device = f"device{self.separator}"
        for name in [name for name in metrics if name.startswith(device)]:
            if name != f"{device}mfu":
                metrics[name.removeprefix(device)] = metrics[name] * self.world_size
            metrics[name] /= self._sharing
        return metrics


def refuse_callbacks(trainer: Trainer, *, cut: bool) -> None:
    """Refuses callbacks that cannot do on several ranks what they do on one device.

    Args:
        trainer: Its callbacks attached, none of them set up.
        cut: Parameters are divided among ranks.

    Raises:
        BatchError: A callback searches for a batch size.
        ModuleError: A callback replaces parameters that are divided.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder):
            raise BatchError(
                f"{type(callback).__name__} enlarges the batch until memory runs out, and on a mesh one rank that runs "
                "out of memory leaves the others waiting for it.",
                fix="set the batch size yourself; micro_batch_size of Mesh3DStrategy keeps memory small at any of them",
            )
        if isinstance(callback, ModelPruning) and cut:
            raise ModuleError(
                f"{type(callback).__name__} puts a masked copy in the place of each parameter while training, and on "
                "this mesh parameters are divided among ranks.",
                valid="zero_stage=0 on the data axis alone",
                fix="prune the whole module after training, or multiply parameters by masks in a hook",
            )


def _write_nothing(writer: BasePredictionWriter) -> Callable[[], None]:
    """Has a writer leave to another rank what that rank has as well; returns what has it write again.

    At the end of an epoch it is called with nothing to write, so that all ranks may gather what they have.
    """

    def on_epoch_end(trainer: Trainer, module: LightningModule, predictions: Any, indices: Any) -> None:
        nothing: list[Any] = [[] for _ in indices]
        write(trainer, module, nothing if len(nothing) > 1 else [], nothing)

    write = writer.write_on_epoch_end
    at_end = ExitStack()
    at_end.callback(shadow(writer, "write_on_batch_end", lambda *_: None))
    at_end.callback(shadow(writer, "write_on_epoch_end", on_epoch_end))
    return at_end.close
