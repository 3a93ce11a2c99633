"""What runs one batch through the user's step for Lightning's loops: the contract, and what all ways have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.batches.weights import WeightedWindow
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.gradients import scale_gradients
from lightning_3d.plan import MeshEngine
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.random.streams import RandomStreams
from lightning_3d.strategy.logging.metrics import MetricDoors
from lightning_3d.strategy.steps.aside import GradientsAside

_STEP_STREAM = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerParts:
    """What every runner works with.

    Attributes:
        module: The user's module.
        engine: Runs its steps on the mesh.
        precision: Contexts and the loss scale.
        config: The strategy's options.
        streams: Random streams, or None for torch's generator alone.
        data_group: The data axis.
        metrics: The doors of the module's metrics.
        trained: Returns the parameters of all optimizers.
        share_buffers: Gives every data rank the running statistics of the first; called once per optimizer step.
    """

    module: LightningModule
    engine: MeshEngine
    precision: Mesh3DPrecision
    config: StrategyConfig
    streams: RandomStreams | None
    data_group: dist.ProcessGroup
    metrics: MetricDoors
    trained: Callable[[], list[Tensor]]
    share_buffers: Callable[[], None]


class BatchRunner(ABC):
    """Runs the steps of a module.

    Attributes:
        accumulating: Whether the optimizer steps only after a later batch.

    Args:
        parts: What it works with.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._module = parts.module
        self._engine = parts.engine
        self._precision = parts.precision
        self._streams = parts.streams
        self._group = parts.data_group
        self._metrics = parts.metrics
        self._trained = parts.trained
        self._share_buffers = parts.share_buffers
        self._batches = MicroBatches(parts.module, parts.config)
        self._aside = GradientsAside(parts.module, parts.precision, parts.trained)
        self._window = WeightedWindow()
        self.accumulating = False

    # ---- training ----

    @abstractmethod
    def training_step(self, *args: Any) -> Any:
        """Returns the output of the user's ``training_step`` for a whole batch; its gradients come with `backward`."""

    @abstractmethod
    def backward(self, loss: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs or completes the backward of the last step.

        Args:
            loss: What Lightning goes backward from: the loss divided by ``accumulate_grad_batches``, or the user's
                in manual optimization.
            plain: Lightning's own backward, hooks included.
        """

    def gradients_arrived(self) -> None:
        """Called between a backward and the hooks that see its gradients."""
        if not self.accumulating:
            self._engine.gradients_arrived()

    def before_optimizer_step(self) -> None:
        """Divides the gradients of a weighted window once, before hooks and clipping see them."""
        self._engine.gradients_complete()
        factor = self._window.gradient_factor(self._group, self._module.device)
        if factor is not None:
            scale_gradients(self._trained(), factor)

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Called when an optimizer has changed the weights."""

    @abstractmethod
    def synchronise(self, synced: bool) -> None:
        """Says whether the next backward meets the other data ranks."""

    # ---- evaluation ----

    @abstractmethod
    def evaluation_step(self, stage: str, context: Callable[[], AbstractContextManager[Any]], *args: Any) -> Any:
        """Returns the output of ``{stage}_step`` for a whole batch.

        Args:
            stage: "validation", "test" or "predict".
            context: Lightning's precision context of that step.
            args: Batch, batch index and, with several loaders, their index.
        """

    # ---- where we are ----

    def _begin_training_step(self) -> None:
        self._aside.forget()
        if self._opens_window:
            self._share_buffers()

    @property
    def _opens_window(self) -> bool:
        """Whether this batch is the first after an optimizer step, by Lightning's count; a step need not take it."""
        return int(self._module.trainer.fit_loop.epoch_loop.batch_idx) % self._accumulation == 0

    @property
    def _goes_backward(self) -> bool:
        """Whether steps train: Lightning's SWA renews running statistics by an epoch of forwards alone."""
        return not self._module.trainer.fit_loop._skip_backward

    @property
    def _accumulation(self) -> int:
        return int(self._module.trainer.accumulate_grad_batches)

    @property
    def _position(self) -> int:
        """Number of training batches so far: restored with the loops, so a resumed run goes on with its streams."""
        return int(self._module.trainer.fit_loop.epoch_loop.total_batch_idx)

    def _stream(self, position: int, index: int, count: int) -> AbstractContextManager[None]:
        """Context in which a step draws from the stream of its micro-batch.

        Args:
            position: Number of the batch.
            index: Number of the micro-batch on this data rank.
            count: Micro-batches of each data rank.
        """
        if self._streams is None:
            return nullcontext()
        self._streams.at(step=position, microbatch=self._group.rank() * count + index)
        # A step may mix its batch by Python's or NumPy's numbers; in modules these depend on the layout.
        return self._streams.stream(_STEP_STREAM, host=True)
