"""What runs the user's step on the stages of a rank, in the order of a schedule, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_3d.errors import ModuleError
from lightning_3d.log import get_logger, process_rank
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.schedule.actions import SPLIT_SCHEDULES, Action, runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.boundary import Boundary, Slot, boundary_of, slot_of
from lightning_3d.parallel.pipeline.schedule.build import build_forward_schedule, build_schedule
from lightning_3d.parallel.pipeline.schedule.cache import RecentlyUsed
from lightning_3d.parallel.pipeline.schedule.stage import ROOT, ScheduledStage
from lightning_3d.parallel.pipeline.schedule.stopwatch import Stopwatch
from lightning_3d.parallel.pipeline.schedule.timeline import Event, Timeline
from lightning_3d.parallel.pipeline.stage_module import StageModule

_log = get_logger(__name__)

# Each schedule keeps buffers for what all its micro-batches receive.
_SCHEDULES = 4
_RECORDS = 256


class StageRuns(Protocol):
    """What runs the user's step on one stage."""

    def run_stage(
        self, stage: int, received: tuple[Tensor, ...], record: StepRecord, step: Callable[[], Any]
    ) -> tuple[Tensor, ...] | Any:
        """Returns what the next stage is sent, or for the last stage the step's output."""

    def record(self, step: Callable[[], Any]) -> StepRecord:
        """Returns what a step does with inputs of one kind; all ranks of the group call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """The micro-batches that a schedule runs.

    Attributes:
        step: Runs the user's step on a micro-batch.
        loss: Gives what to go backward from; None for evaluation.
        records: What the step does with each micro-batch.
        kinds: What each stage receives of a micro-batch, by the record's identity and the stage.
        boundaries: What each stage receives.
        outputs: What the step returned on the last stage, by micro-batch.
    """

    step: Callable[[int], Any]
    loss: Callable[[int, Any], Tensor] | None
    records: tuple[StepRecord, ...]
    kinds: Mapping[tuple[int, int], tuple[Slot, ...]]
    boundaries: tuple[Boundary, ...]
    outputs: dict[int, Any] = field(default_factory=dict)


class PipelineEngine:
    """Runs steps of a module on the stages of this rank.

    A step runs on micro-batches of one kind or of several: each kind has a signature, and is recorded when it is first
    seen. Schedules are made for the shapes between the stages and kept for the next batch with the same ones.

    Args:
        plan: The plan.
        stages: The stage modules of this rank by stage.
        runs: Runs the user's step on one stage.
        group: The pipeline group.
        device: Where the stages compute.
        whole_backward: Backwards are never split into halves: parameters are of units or cut over the tensor axis.
        lazy_units: Units gather their parameters one by one (ZeRO 3).
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stages: Mapping[int, StageModule],
        runs: StageRuns,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        whole_backward: bool,
        lazy_units: bool,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._runs = runs
        self._group = group
        self._device = device
        self._whole_backward = whole_backward
        self._lazy_units = lazy_units
        self._records: RecentlyUsed[StepRecord] = RecentlyUsed(_RECORDS)
        self._schedules: RecentlyUsed[tuple[list[ScheduledStage], Any]] = RecentlyUsed(_SCHEDULES)
        self._stopwatch = Stopwatch(device)
        self._batch: _Batch | None = None
        self._noticed = False
        for module in stages.values():
            module.connect(self._run_stage)
        if whole_backward and plan.schedule in SPLIT_SCHEDULES and process_rank() == 0:
            self._notice("units of parameters or the tensor axis")

    @property
    def modules(self) -> tuple[StageModule, ...]:
        """The stages of this rank, in model order."""
        return tuple(module for _, module in sorted(self._stages.items()))

    @property
    def buffers(self) -> list[Tensor]:
        """What its schedules receive in: one for each micro-batch."""
        stages = [stage for made, _ in self._schedules.values() for stage in made]
        infos = [
            info for stage in stages for each in (stage.args_recv_info, stage.grad_recv_info) for info in each.values()
        ]
        return [info.buffer for row in infos for info in row if info.buffer is not None]

    def train(
        self, step: Callable[[int], Any], loss: Callable[[int, Any], Tensor], signatures: Sequence[Hashable]
    ) -> dict[int, Any]:
        """Runs a batch forward and backward.

        Args:
            step: Runs the user's step on a micro-batch.
            loss: Returns the scalar to go backward from, of a micro-batch and the step's output; the gradients of all
                micro-batches add up.
            signatures: Kind of input of each micro-batch, equal on all ranks of the group.

        Returns:
            The step's outputs by micro-batch, without graph; empty on ranks that do not own the last stage.

        Raises:
            ModuleError: A loss does not depend on anything that trains.
        """
        batch = self._prepared(step, loss, signatures)
        count = runnable_microbatches(self._plan.schedule, ranks=self._plan.ranks, microbatches=len(signatures))
        return self._run(batch, build_schedule, count, target=torch.arange(count))

    def evaluate(self, step: Callable[[int], Any], signatures: Sequence[Hashable]) -> dict[int, Any]:
        """Runs a batch forward alone.

        Args:
            step: Runs the user's step on a micro-batch.
            signatures: Kind of input of each micro-batch, equal on all ranks of the group.

        Returns:
            The step's outputs by micro-batch, without graph; empty on ranks that do not own the last stage.
        """
        with torch.no_grad():
            batch = self._prepared(step, None, signatures)
            return self._run(batch, build_forward_schedule, len(signatures))

    def unseen(self, signatures: Sequence[Hashable]) -> tuple[int, ...]:
        """Returns the first micro-batch of each kind that has not been recorded."""
        first = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
        return tuple(sorted(index for signature, index in first.items() if signature not in self._records))

    def learn(self, step: Callable[[], Any], signature: Hashable) -> None:
        """Records what the step does with a kind of input; all ranks of the group call it together.

        What is not learnt before it is run is recorded then. Data ranks that gather parameters must record together.

        Args:
            step: Runs the user's step on a micro-batch of this kind.
            signature: The kind.

        Raises:
            PlanError: The step does not run on the stages of the plan.
            ModuleError: It does what stages cannot share out.
        """
        self._records.put(signature, self._runs.record(step))

    def know(self, record: StepRecord, signature: Hashable) -> None:
        """Takes a record that was made elsewhere, for a rank that has no others to make it with.

        Args:
            record: What the step does with a kind of input.
            signature: The kind.
        """
        self._records.put(signature, record)

    def watch(self, beside: Callable[[Action], AbstractContextManager[None]]) -> None:
        """Has every computation of a stage run in a context.

        Args:
            beside: Returns it.
        """
        self._stopwatch.beside = beside

    def start_timeline(self) -> None:
        """Begins to take the times of all computations; every rank of the group calls it."""
        self._stopwatch.start()

    def stop_timeline(self) -> Timeline:
        """Returns the computations of all ranks since the start; all ranks of the group call it together.

        Between machines they are as exact as their clocks agree.
        """
        own = self._stopwatch.stop(dist.get_rank(self._group))
        events: list[tuple[Event, ...]] = [()] * self._plan.ranks
        dist.all_gather_object(events, own, group=self._group)
        return Timeline(self._plan.ranks, tuple(event for row in events for event in row))

    def _prepared(
        self, step: Callable[[int], Any], loss: Callable[[int, Any], Tensor] | None, signatures: Sequence[Hashable]
    ) -> _Batch:
        records = tuple(
            self._records.get(signature, partial(self._runs.record, partial(step, index)))
            for index, signature in enumerate(signatures)
        )
        # Micro-batches of one kind have one record.
        different = {id(record): record for record in records}
        kinds = {
            (key, stage.index): tuple(map(slot_of, record.boundaries[stage.first])) if stage.index else ()
            for key, record in different.items()
            for stage in self._plan.stages
        }
        boundaries = tuple(
            boundary_of(kinds[key, stage.index] for key in different) if stage.index else Boundary(())
            for stage in self._plan.stages
        )
        return _Batch(step=step, loss=loss, records=records, kinds=kinds, boundaries=boundaries)

    def _run(self, batch: _Batch, build: Callable[..., Any], microbatches: int, **options: Any) -> dict[int, Any]:
        """Runs a batch in a schedule that is made for it, or for one like it before."""
        assert self._batch is None, "a step that a schedule runs does not start another one"
        # Buffers that were made in inference mode cannot be written to outside of it.
        key = build, batch.boundaries, microbatches, torch.is_inference_mode_enabled()
        stages, schedule = self._schedules.get(key, partial(self._scheduled, build, batch.boundaries, microbatches))
        self._batch = batch
        try:
            schedule.step(return_outputs=False, **options)
        except BaseException:
            # What a schedule has begun to receive is not to be found by its next step.
            self._schedules.clear()
            raise
        finally:
            self._batch = None
        for stage in stages:
            stage.clear_runtime_states()
        return dict(sorted(batch.outputs.items()))

    def _scheduled(
        self, build: Callable[..., Any], boundaries: Sequence[Boundary], microbatches: int
    ) -> tuple[list[ScheduledStage], Any]:
        stages = [
            ScheduledStage(
                module,
                index,
                boundaries=boundaries,
                device=self._device,
                group=self._group,
                stopwatch=self._stopwatch,
                whole=None if self._whole_backward else self._notice,
            )
            for index, module in sorted(self._stages.items())
        ]
        return stages, build(self._plan.schedule, stages, microbatches=microbatches, lazy_units=self._lazy_units)

    def _run_stage(self, stage: int, received: tuple[Tensor, ...], microbatch: int) -> Any:
        """Runs the user's step on one stage; micro-batches beyond the batch's own are empty ones."""
        batch = self._batch
        assert batch is not None, "stages are run by schedules"
        last = stage + 1 == len(self._plan.stages)
        if microbatch >= len(batch.records):
            return _empty((ROOT,) if last else batch.boundaries[stage + 1].slots, received, self._device)
        record = batch.records[microbatch]
        values = batch.boundaries[stage].unpack(received, batch.kinds[id(record), stage])
        result = self._runs.run_stage(stage, values, record, partial(batch.step, microbatch))
        if not last:
            return batch.boundaries[stage + 1].pack(result, batch.kinds[id(record), stage + 1])
        root = ROOT.on(self._device) if batch.loss is None else _root(batch.loss(microbatch, result), microbatch)
        # A graph that the caller keeps would keep the activations.
        batch.outputs[microbatch] = tree_map_only(Tensor, Tensor.detach, result)
        return (root,)

    def _notice(self, reason: str) -> None:
        """Says once that the bubble will not be filled as the schedule would.

        Only the rank of a stage knows of it, so each rank of one pipeline speaks.
        """
        told = self._noticed or 0 not in dist.get_process_group_ranks(self._group)
        level = logging.DEBUG if told else logging.WARNING
        self._noticed = True
        _log.log(level, "%s runs whole backwards, so it fills less of the bubble: %s", self._plan.schedule, reason)


def _empty(slots: Sequence[Slot], received: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Zeros that depend on what was received, which is nothing but zeros too, so that the backward has its way."""
    link = sum((value.sum() for value in received if value.requires_grad), torch.zeros((), device=device))
    return tuple(slot.on(device) + link.to(slot.dtype) if slot.requires_grad else slot.on(device) for slot in slots)


def _root(loss: Tensor, microbatch: int) -> Tensor:
    if not loss.requires_grad:
        raise ModuleError(
            f"the loss of micro-batch {microbatch} does not depend on any parameter that trains.",
            fix="return a loss that is computed from the model's outputs, with gradients enabled",
        )
    # A tensor of its own, which torch detaches in place, and of a dtype that is known before the step.
    return loss.sum(dtype=torch.float32)
