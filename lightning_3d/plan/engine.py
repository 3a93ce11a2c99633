"""What runs the steps of a module on all axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_3d.gradients import PipelineShare
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.parallel.tensor.replay.block import BlockReport
from lightning_3d.parallel.tensor.replay.blocks import Replays
from lightning_3d.plan.stages import StagesOnRank


class MeshEngine:
    """Runs steps of a module and keeps its gradients in step over the mesh.

    Attributes:
        tensor: The tensor axis, or None where its degree is 1.
        stages: The pipeline axis, or None where its degree is 1.
        replays: The blocks that are recorded and replayed, while a Trainer runs the module.

    Args:
        data: The data axis.
        tensor: The tensor axis.
        stages: The pipeline axis.
    """

    def __init__(self, data: DataEngine, tensor: TensorState | None = None, stages: StagesOnRank | None = None) -> None:
        self.tensor = tensor
        self.stages = stages
        self.replays: Replays | None = None
        self._data = data
        self._arrived = False

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Returns ``step(*args)``, a method of the module that calls it or its parts, with gradients to come."""
        tensor = self.tensor
        if tensor is None:
            return self._data.run(step, *args)
        return self._data.run(lambda *given: tensor.visit(partial(step, *given)), *args)

    def scheduled(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, which has a schedule run steps and their backwards on the stages of this rank."""
        with self.backward():
            return self._data.run(call)

    def visit(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, a use of the module that is no training step; nothing stays gathered behind it.

        On a pipeline axis all ranks of it come here, and each part is computed by the rank that owns it.
        """
        return self.visit_part(call if self.stages is None else partial(self.stages.runs.shared, call))

    def visit_part(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, a call of a part that this rank holds."""
        if self.tensor is None:
            return self._data.visit(call)
        return self._data.visit(partial(self.tensor.visit, call))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward: what is recomputed there reads parameters as a step does."""
        with self._data.backward(), nullcontext() if self.tensor is None else self.tensor.activity:
            yield

    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Called before the forward of a micro-batch, or before a schedule of several of them.

        Args:
            last: The optimizer step comes next, so gradients must meet.
            backwards: Micro-batches with a backward until the next call.
        """
        self._arrived = False
        self._data.before_microbatch(last=last, backwards=backwards)

    def gradients_arrived(self) -> None:
        """Called after the last backward before an optimizer step, before hooks see the gradients."""
        if self.tensor is not None:
            self.tensor.complete_partial_gradients()
        if self.stages is not None and not self._arrived:
            self._arrived = True
            self.stages.gradients.sum()

    @property
    def share(self) -> PipelineShare | None:
        """What this rank knows of the gradients of the whole mesh; None where all pipeline ranks are one."""
        return None if self.stages is None else self.stages.share

    def gradients_complete(self) -> None:
        """Called when the gradients of an optimizer step have met, before anything reads them."""
        self.gradients_arrived()
        self._data.gradients_complete()

    def reports(self) -> tuple[BlockReport, ...]:
        """Returns what became of each block that may be replayed."""
        return () if self.replays is None else self.replays.reports()

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Called for a backward inside a step that is still running; returns the loss to go backward from."""
        return self._data.before_inner_backward(loss)

    def after_inner_backward(self) -> None:
        """Called after a backward, or an optimizer step, inside a step that is still running."""
        self._data.after_inner_backward()

    def rest(self) -> None:
        """Called when no step runs for a while, and before weights are read or written from outside."""
        self._data.rest()
