"""A batch for the stages of a pipeline: the user's step on each of its micro-batches, and what these have to tell."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.batches.join import join_outputs
from lightning_3d.batches.logs import LogCall, LogCollector
from lightning_3d.batches.prints import SaidLines, lines_of_batch
from lightning_3d.batches.signature import signature
from lightning_3d.batches.weights import loss_of, shares, weight_of
from lightning_3d.errors import Lightning3DError, ModuleError
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.quiet import quiet
from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.strategy.steps.whole import no_loss, output_shares

_OUTPUT, _LOGGED = "output", "logged"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step has to tell about a batch, on the rank of the last stage; the same on all others once it was sent.

    Attributes:
        output: What the step returned, of all micro-batches together.
        logs: What it logged, one call for each name.
        lines: What it printed.
        weights: The ``loss_weight`` of each micro-batch, or None.
        attributes: What it changed in the module, from `StepAttributes.changed`.
    """

    output: Any
    logs: tuple[LogCall, ...]
    lines: tuple[str, ...]
    weights: tuple[float | None, ...]
    attributes: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedBatch:
    """A batch whose micro-batches a schedule runs.

    Attributes:
        module: The user's module.
        run: Runs a step on the mesh.
        method: Name of its step.
        parts: The micro-batches.
        sizes: Samples of each; one that is the whole batch counts as one.
        kinds: What decides which way the step takes with each, from `kinds_of`.
        rest: What the step is given besides.
        count: Micro-batches that run. Those beyond the batch's own repeat the last one, unseen, so that data ranks with
            more of them do not wait.
        around: Context of a micro-batch: precision and random stream.
        kept: Micro-batch to what its step has logged.
        said: Micro-batch to what its step has printed.
    """

    module: LightningModule
    run: Callable[..., Any]
    method: str
    parts: Sequence[Any]
    sizes: Sequence[int]
    kinds: tuple[Hashable, ...]
    rest: tuple[Any, ...]
    count: int
    around: Callable[[int], AbstractContextManager[Any]]
    kept: dict[int, list[LogCall]]
    said: dict[int, list[str]]

    def step(self, index: int) -> dict[str, Any]:
        """Runs the user's step on a micro-batch, up to where the stage ends.

        Returns:
            Its output, and what it has logged: on the last stage both may hold values that earlier ones have made.
        """
        logs: list[LogCall] = []
        logged: list[Any] = []

        def keep(name: str, value: Any, *args: Any, **options: Any) -> None:
            logs.append(LogCall.of(self.module, name, value, *args, **options))
            logged.append(value)

        own, said = index < len(self.parts), SaidLines()
        with ExitStack() as at_end:
            if not own:
                at_end.enter_context(quiet(self.module, keep_log=True))
            at_end.callback(shadow(self.module, "log", keep))
            at_end.callback(shadow(self.module, "print", said.add))
            at_end.enter_context(self.around(index))
            step = getattr(self.module, self.method)
            output = self.run(step, self.parts[index if own else -1], *self.rest)
        if own:
            self.kept[index], self.said[index] = logs, said.lines
        return {_OUTPUT: output, _LOGGED: logged}

    @property
    def signatures(self) -> list[Hashable]:
        """The kinds of all micro-batches that run."""
        return [*self.kinds, *self.kinds[-1:] * (self.count - len(self.kinds))]

    def outcome(self, results: Mapping[int, Any], attributes: bytes) -> StepOutcome:
        """Returns what the batch has to tell.

        Args:
            results: What `step` returned for each micro-batch.
            attributes: What the batch has changed in the module.
        """
        collector = LogCollector()
        outputs = []
        single = len(self.parts) == 1
        for index, size in enumerate(self.sizes):
            outputs.append(whole(results[index][_OUTPUT]))
            for call, value in zip(self.kept[index], whole(results[index][_LOGGED]), strict=True):
                # What was no plain tensor in the step stood for one that has arrived since.
                arrived = isinstance(call.value, Tensor) and type(call.value) is not Tensor
                collector.add(replace(call, value=value) if arrived else call, None if single else size)
        weights = tuple(weight_of(output) for output in outputs)
        training = self.method == "training_step"
        joined = join_outputs(
            outputs, sizes=self.sizes, shares=output_shares(self.sizes, weights) if training else shares(self.sizes)
        )
        return StepOutcome(
            output=joined,
            logs=tuple(collector.combined()),
            lines=lines_of_batch([self.said[index] for index in range(len(self.sizes))]),
            weights=weights,
            attributes=attributes,
        )


def kinds_of(
    module: LightningModule, method: str, parts: Sequence[Any], sizes: Sequence[int], rest: Sequence[Any]
) -> tuple[Hashable, ...]:
    """Returns for each micro-batch what decides which way a step takes.

    Args:
        module: The user's module.
        method: Name of its step.
        parts: The micro-batches.
        sizes: Samples of each; one that is the whole batch counts as one.
        rest: What the step is given besides.
    """
    trained = hash(tuple(parameter.requires_grad for parameter in module.parameters()))
    # A step may do something else in a later epoch.
    state = (method, module.training, trained, module.current_epoch, *rest[1:])
    return tuple(
        (state, signature(part, size if len(sizes) > 1 else None)) for part, size in zip(parts, sizes, strict=True)
    )


class BatchLoss:
    """What the last stage goes backward from, by micro-batch.

    Args:
        batch: The batch.
        accumulation: Batches of an optimizer step.
        scaled: Multiplies with the loss scale.
    """

    def __init__(self, batch: PipelinedBatch, accumulation: int, scaled: Callable[[Tensor], Tensor]) -> None:
        self._parts = [share / accumulation for share in shares(batch.sizes)]
        self._scaled = scaled
        self._device = batch.module.device
        self._failure: Lightning3DError | None = None

    def __call__(self, index: int, result: Mapping[str, Any]) -> Tensor:
        """Returns the share of a micro-batch in the loss of its optimizer step.

        A schedule cannot stop on one rank alone, so a step without a loss is told afterwards, to all ranks.
        """
        output = whole(result[_OUTPUT])
        try:
            return self._scaled(self._checked(loss_of(output)) * self._factor(index, output))
        except Lightning3DError as error:
            self._failure = self._failure or error
            # Nothing goes back from it.
            return torch.zeros((), device=self._device, requires_grad=True)

    def check(self) -> None:
        """Raises what was wrong with a loss of the batch."""
        if self._failure is not None:
            raise self._failure

    def _factor(self, index: int, output: Any) -> float:
        if index >= len(self._parts):
            return 0.0
        weight = weight_of(output)
        return self._parts[index] if weight is None else weight

    @staticmethod
    def _checked(loss: Tensor | None) -> Tensor:
        if loss is None:
            raise no_loss()
        if not loss.requires_grad:
            raise ModuleError(
                "the loss of training_step does not depend on any parameter that trains.",
                fix="return a loss that is computed from the model's outputs, with gradients enabled",
            )
        return loss
