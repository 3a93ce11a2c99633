"""The optimizer steps of one rank, in the order in which the strategy and Lightning take them.

What neither depends on the mesh nor takes memory is left out: hooks, callbacks, logs, loss scales, learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_3d.batches.weights import loss_of, shares
from lightning_3d.dryrun.planned import Planned
from lightning_3d.errors import ModuleError
from lightning_3d.gradients import clip_by_norm
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.quiet import silent
from lightning_3d.graph.stand_ins import without_metrics
from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.plan import MeshEngine

# Names a part of the step for as long as it runs, and the micro-batch that it is for.
Phase: TypeAlias = Callable[[str, int | None], AbstractContextManager[None]]


class RankSteps:
    """Runs optimizer steps on one rank.

    Args:
        planned: The training and its plan.
        module: The module, this rank's part of it.
        engine: Runs its steps.
        optimizers: Its optimizers.
        world: All ranks.
        phase: Is told what runs.
        keeps_gradients: Gradients have memory of their own that stays, as those in DDP's buckets.
    """

    def __init__(
        self,
        planned: Planned,
        module: LightningModule,
        engine: MeshEngine,
        optimizers: list[Optimizer],
        *,
        world: dist.ProcessGroup,
        phase: Phase,
        keeps_gradients: bool = False,
    ) -> None:
        self._planned = planned
        self._module = module
        self._engine = engine
        self._optimizers = optimizers
        self._world = world if world.size() > 1 else None
        self._phase = phase
        self._keeps_gradients = keeps_gradients
        self._shares = shares(planned.sizes)
        if engine.stages is not None:
            for kind, record in planned.records.items():
                engine.stages.engine.know(record, kind)

    def __call__(self) -> None:
        """Takes one optimizer step: its batches forward and backward, then the optimizers."""
        accumulate = self._planned.training.accumulate
        with self._heard_by_nobody():
            for batch in range(accumulate):
                self._batch(first=batch == 0, last=batch == accumulate - 1)
        with self._phase("optimizer", None):
            self._engine.gradients_complete()
            self._clip()
            for optimizer in self._optimizers:
                optimizer.step()

    def _batch(self, *, first: bool, last: bool) -> None:
        if self._engine.stages is not None:
            self._zero_if(first)
            self._scheduled(last=last)
        elif len(self._planned.parts) == 1:
            # Lightning zeroes gradients between forward and backward.
            self._microbatch(0, last=last, between=partial(self._zero_if, first))
        else:
            self._zero_if(first)
            for index in range(self._planned.played):
                self._microbatch(index, last=last and index == self._planned.played - 1)
        if last:
            self._engine.gradients_arrived()

    def _microbatch(self, index: int, *, last: bool, between: Callable[[], None] = lambda: None) -> None:
        self._engine.before_microbatch(last=last)
        with self._phase(f"forward of micro-batch {index}", index):
            output = self._step(index)
        between()
        with self._phase(f"backward of micro-batch {index}", index), self._engine.backward():
            self._loss(index, output).backward()

    def _scheduled(self, *, last: bool) -> None:
        stages, kinds = self._engine.stages, self._planned.kinds[: self._planned.played]
        assert stages is not None, "there is a pipeline"
        self._engine.before_microbatch(last=last, backwards=len(kinds))
        self._engine.scheduled(partial(stages.engine.train, self._step, self._loss, kinds))

    def _step(self, index: int) -> Any:
        training = self._planned.training
        precision, part = training.dtypes, self._planned.parts[index]
        with precision.train_step_context():
            batch = precision.convert_input(part)
            return self._engine.run(self._module.training_step, batch, *training.rest(self._module))

    def _loss(self, index: int, output: Any) -> Tensor:
        found = loss_of(whole(output))
        if found is None:
            raise ModuleError("training_step returned no loss.", valid='a tensor, or a mapping with "loss"')
        return found * (self._shares[index] / self._planned.training.accumulate)

    def _zero_if(self, first: bool) -> None:
        for optimizer in self._optimizers if first else ():
            optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    def _clip(self) -> None:
        largest = self._planned.training.clip_norm
        if largest is not None:
            trained = [
                each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]
            ]
            clip_by_norm(trained, largest, group=self._world, share=self._engine.share)

    @contextmanager
    def _heard_by_nobody(self) -> Iterator[None]:
        """Context in which the step logs and prints nothing, and metrics keep nothing."""
        put_back = [shadow(self._module, name, silent) for name in ("log", "print")]
        try:
            with without_metrics(self._module):
                yield
        finally:
            for each in put_back:
                each()


def give_state(optimizers: list[Optimizer]) -> None:
    """Has optimizers make their state, which most do in their first step, and leaves gradients as a step does.

    Raises:
        ModuleError: One of them runs the module itself.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ModuleError("LBFGS runs the step as often as it likes.", fix="an optimizer that steps once")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()


def optimizers_on_rank(module: LightningModule) -> list[Optimizer]:
    """Returns the module's optimizers, over what this rank holds; groups may be empty."""
    optimizers, _ = _init_optimizers_and_lr_schedulers(module)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [each for each in group["params"] if not each.is_meta]
    return optimizers
