"""A step in stages that are chained by hand, one after the other, and the same step on one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.graph.calls import Call, Handler, around_calls
from lightning_3d.parallel.pipeline.apply import AppliedStages, apply_pipeline
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.run.hooks import forward_hooks
from lightning_3d.parallel.pipeline.run.runs import PipelineRuns
from lightning_3d.random.streams import RandomStreams
from tests.unit.parallel.pipeline.planned import plan

CPU = torch.device("cpu")
Step = Callable[[], Any]


def drawing(streams: RandomStreams, name: str) -> Handler:
    def handler(call: Call) -> Any:
        with streams.stream(name):
            return call()

    return handler


def inside(streams: RandomStreams) -> AbstractContextManager[None]:
    """The place of the step's own draws."""
    streams.at(step=0, microbatch=0)
    return streams.stream("step")


@dataclass
class Cut:
    """A module of which this rank has its stages."""

    module: L.LightningModule
    plan: PipelinePlan
    applied: AppliedStages
    runs: PipelineRuns
    streams: RandomStreams
    rank: int

    @classmethod
    def of(cls, module: L.LightningModule, batch: Any, rank: int, world: int, **options: Any) -> Cut:
        found = plan(module, batch, world, **options)
        hooks = forward_hooks(module)
        streams = RandomStreams(3)
        applied = apply_pipeline(module, found, rank, CPU)
        runs = PipelineRuns(module, found, rank, dist.group.WORLD, hooks=hooks, device=CPU, streams=streams)
        for name in found.modules:
            around_calls(module.get_submodule(name), _both(runs.around(name), drawing(streams, name)))
        return cls(module, found, applied, runs, streams, rank)

    def record(self, step: Step) -> StepRecord:
        with inside(self.streams):
            return self.runs.record(step)

    def forward(self, record: StepRecord, step: Step) -> tuple[Any, list[tuple[list[Tensor], Any]]]:
        """Returns the output on the last stage's rank, and what backward needs."""
        passed: list[tuple[list[Tensor], Any]] = []
        output: Any = None
        for stage in self.plan.stages:
            values = record.boundaries[stage.first] if stage.index else ()
            before = self.plan.stages[stage.index - 1].rank
            if self.rank == before and stage.index:
                for tensor in passed[-1][1]:
                    dist.send(tensor.detach(), stage.rank)
            if self.rank != stage.rank:
                continue
            received = [torch.empty(value.shape, dtype=value.dtype) for value in values]
            for value, tensor in zip(values, received, strict=True):
                dist.recv(tensor, before)
                tensor.requires_grad_(value.requires_grad and torch.is_grad_enabled())
            with inside(self.streams):
                output = self.runs.run_stage(stage.index, tuple(received), record, step)
            passed.append((received, output))
        return (output if self.rank == self.plan.last_rank else None), passed

    def backward(self, passed: list[tuple[list[Tensor], Any]]) -> None:
        for stage in reversed(self.plan.stages):
            if self.rank == stage.rank:
                received, sent = passed.pop()
                if stage.index == len(self.plan.stages) - 1:
                    sent.backward()
                else:
                    after = self.plan.stages[stage.index + 1].rank
                    wanted = [tensor for tensor in sent if tensor.requires_grad]
                    gradients = [torch.empty_like(tensor) for tensor in wanted]
                    for gradient in gradients:
                        dist.recv(gradient, after)
                    torch.autograd.backward(wanted, gradients)
                if stage.index:
                    for tensor in received:
                        if tensor.requires_grad:
                            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                            dist.send(gradient, self.plan.stages[stage.index - 1].rank)

    def gradients(self) -> dict[str, Tensor]:
        """What this rank holds; what several hold is summed."""
        found = {}
        for name, parameter in self.module.named_parameters():
            ranks = self.plan.ranks_holding(name)
            gradient = parameter.grad
            if len(ranks) > 1:
                gradient = torch.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient.clone()
                dist.all_reduce(gradient)
            if self.rank in ranks:
                assert not parameter.is_meta
                found[name] = gradient
            else:
                assert parameter.is_meta
        return found


def whole(module: L.LightningModule, step: Step, names: Any) -> tuple[Any, dict[str, Tensor | None]]:
    """The same step on one process."""
    streams = RandomStreams(3)
    for name in names:
        around_calls(module.get_submodule(name), drawing(streams, name))
    with inside(streams):
        output = step()
    output.backward()
    return output.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def _both(outer: Handler, inner: Handler) -> Handler:
    def handler(call: Call) -> Any:
        return outer(Call(lambda *args, **kwargs: inner(Call(call.function, args, kwargs)), call.args, call.kwargs))

    return handler


def check_parity(
    rank: int, world: int, build: Callable[[], tuple[L.LightningModule, Any]], tolerance: float, **options: Any
) -> list[str]:
    """Fails if a step in stages gives another loss or other gradients; returns what crosses the first boundary."""
    module, batch = build()
    cut = Cut.of(module, batch, rank, world, **options)
    record = cut.record(lambda: module.training_step(batch, 0))
    output, passed = cut.forward(record, lambda: module.training_step(batch, 0))
    cut.backward(passed)
    found = cut.gradients()
    reference, batch = build()
    loss, gradients = whole(reference, lambda: reference.training_step(batch, 0), cut.plan.modules)
    if output is not None:
        torch.testing.assert_close(output.detach(), loss, rtol=tolerance, atol=tolerance)
    for name, gradient in found.items():
        expected = gradients[name]
        if expected is None:
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None, name
            torch.testing.assert_close(
                gradient, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    return [str(value.origin) for value in record.boundaries[cut.plan.stages[1].first]]
