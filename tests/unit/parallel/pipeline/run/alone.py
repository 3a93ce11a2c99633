"""All stages of a step in one process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.graph.calls import around_calls
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.run.hooks import forward_hooks
from lightning_3d.parallel.pipeline.run.runs import PipelineRuns
from tests.unit.parallel.pipeline.planned import plan as plan_of_two

CPU = torch.device("cpu")


class Alone:
    """Both stages of a module on the only rank."""

    def __init__(self, module: L.LightningModule, batch: Any) -> None:
        found = plan_of_two(module, batch, 2)
        self.plan: PipelinePlan = replace(
            found, ranks=1, stages=tuple(replace(stage, rank=0) for stage in found.stages)
        )
        assert dist.group.WORLD is not None
        self.runs = PipelineRuns(module, self.plan, 0, dist.group.WORLD, hooks=forward_hooks(module), device=CPU)
        for name in found.modules:
            around_calls(module.get_submodule(name), self.runs.around(name))
        self.step: Callable[[], Any] = lambda: module.training_step(batch, 0)
        self.record: StepRecord = self.runs.record(self.step)

    def first(self) -> tuple[Tensor, ...]:
        """What the first stage sends."""
        sent = self.runs.run_stage(0, (), self.record, self.step)
        assert isinstance(sent, tuple)
        return sent

    def second(self, sent: tuple[Tensor, ...]) -> tuple[Any, list[Tensor]]:
        """What the second returns, and what it received."""
        received = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent]
        return self.runs.run_stage(1, tuple(received), self.record, self.step), received

    def backward(self) -> Tensor:
        """Runs forward and backward; returns the loss."""
        sent = self.first()
        loss, received = self.second(sent)
        loss.backward()
        pairs = [(out, into.grad) for out, into in zip(sent, received, strict=True) if into.grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        detached: Tensor = loss.detach()
        return detached


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
