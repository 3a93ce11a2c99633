"""What ranks send to each other in training steps, counted: per mesh axis and operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_3d.counters.collectives import CollectiveCounter, CollectiveRow, CollectiveTable
from lightning_3d.errors import ConfigError
from lightning_3d.log import get_logger
from lightning_3d.strategy import Mesh3DStrategy
from lightning_3d.units import counted, format_bytes

_log = get_logger(__name__)
# What one rank receives another one sends; it counts there.
_RECEIVE = "receive"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationReport:
    """What all ranks have sent in some optimizer steps.

    Args:
        steps: How many.
        tables: What each rank has counted, in the order of the ranks.
    """

    steps: int
    tables: tuple[CollectiveTable, ...]

    def most_sent(self, operation: str | None = None, axis: str | None = None) -> float:
        """Returns the bytes of a step that the rank sends which sends most of them; None stands for all."""
        return max(_sent(table, operation, axis) for table in self.tables) / self.steps

    def values(self, rank: int = 0) -> dict[str, float]:
        """Returns the calls of a step and the bytes that a rank sends or receives, by names as loggers take them."""
        found: dict[str, float] = {}
        for row in self.tables[rank].rows:
            name = f"communication/{row.axis}/{row.operation}"
            found |= {f"{name}_calls": row.calls / self.steps, f"{name}_bytes": row.wire / self.steps}
        return found

    def __str__(self) -> str:
        steps = "an optimizer step" if self.steps == 1 else f"an optimizer step, the mean of {self.steps}"
        rows = self.tables[0].rows
        if not rows:
            return f"communication in {steps}: rank 0 sends nothing"
        head = (
            f"{'operation':<15} {'axis':<18} {'ranks':>6} {'calls':>7} {'payload':>12} {'sent':>12} {'most sent':>12}"
        )
        sent, most = format_bytes(_sent(self.tables[0]) / self.steps), format_bytes(self.most_sent())
        sums = f"{'in all':<15} {'':<18} {'':>6} {'':>7} {'':>12} {sent:>12} {most:>12}"
        title = f"communication in {steps}, of rank 0; most sent: of the rank that sends most"
        return "\n".join([title, head, *map(self._line, rows), sums])

    def _line(self, row: CollectiveRow) -> str:
        line = (
            f"{row.operation:<15} {row.axis:<18} {row.group_size:>6} {row.calls / self.steps:>7.4g} "
            f"{format_bytes(row.payload / self.steps):>12}"
        )
        if row.operation == _RECEIVE:
            return line
        most = self.most_sent(row.operation, row.axis)
        return f"{line} {format_bytes(row.wire / self.steps):>12} {format_bytes(most):>12}"


class Communication(Callback):
    """Counts the collectives of some training steps, and prints them on rank 0: calls and bytes of an optimizer step.

    Counted is what the ranks ask their process groups for between the start and the end of a training batch: gradients,
    shards that are gathered, sums of the tensor axis, what stages send each other, and what a strategy agrees on. Bytes
    that a rank sends are those of a ring, see `CollectiveRow`. Steps that are counted take longer. Inside of blocks
    that ``torch.compile`` has compiled nothing is seen.

    Args:
        at_batch: How many training batches come before it; the first ones do more than others.
        steps: Optimizer steps to count.

    Attributes:
        report: What was counted; None before.

    Raises:
        ConfigError: A number is too small.
    """

    def __init__(self, at_batch: int = 2, steps: int = 3) -> None:
        if at_batch < 0 or steps < 1:
            raise ConfigError(
                f"Communication(at_batch={at_batch}, steps={steps}) counts nothing.",
                valid="at_batch of at least 0, steps of at least 1",
            )
        self.at_batch = at_batch
        self.steps = steps
        self.report: CommunicationReport | None = None
        self._counter: CollectiveCounter | None = None
        self._done = False
        self._inside = False
        self._batches = self._counted_steps = self._step = 0
        self._is_whole_step = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.report, self._counter = None, None
        self._batches = self._counted_steps = 0
        self._step, self._is_whole_step = trainer.global_step, True
        self._done = not dist.is_initialized() or dist.get_world_size() == 1
        if self._done:
            _log.info("no communication to count: there is one process")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Counted from the first batch of an optimizer step to the last one.
        if self._counter is None and not self._done and self._batches >= self.at_batch and self._is_whole_step:
            self._counter = CollectiveCounter(_groups(trainer))
        if self._counter is not None and not self._done:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
            self._inside = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._leave()
        self._batches += 1
        self._is_whole_step = trainer.global_step > self._step
        self._step = trainer.global_step
        if self._counter is not None and not self._done:
            self._counted_steps += self._is_whole_step
            if self._counted_steps == self.steps:
                self._done = True
                self._tell(trainer, self._counter.table)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._done and trainer.is_global_zero:
            _log.info(
                "no communication report: training ended before batch %d and %s after it",
                self.at_batch,
                counted(self.steps, "optimizer step"),
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._inside and self._counter is not None:
            self._inside = False
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _tell(self, trainer: Trainer, own: CollectiveTable) -> None:
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, own)
        self.report = CommunicationReport(steps=self.steps, tables=tuple(tables))
        if not trainer.is_global_zero:
            return
        _log.info("%s", self.report)
        for logger in trainer.loggers:
            logger.log_metrics(self.report.values(), step=trainer.global_step)


def _sent(table: CollectiveTable, operation: str | None = None, axis: str | None = None) -> float:
    return table.wire(operation, axis) - (table.wire(_RECEIVE, axis) if operation in (None, _RECEIVE) else 0)


def _groups(trainer: Trainer) -> DeviceMesh | Mapping[str, dist.ProcessGroup]:
    """The axes of a mesh, or all ranks."""
    if isinstance(trainer.strategy, Mesh3DStrategy):
        return trainer.strategy.device_mesh
    world = dist.group.WORLD
    assert world is not None, "ranks have met"
    return {"world": world}
