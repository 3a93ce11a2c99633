"""What all ranks of a dry run have in common: the plan, the micro-batches, and what a step does with each kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.batches.signature import signature
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.dryrun.training import Training
from lightning_3d.graph.fake_run import fake_run
from lightning_3d.graph.observer import Observer
from lightning_3d.parallel.pipeline.planning import pipeline_observer
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.parallel.tensor.trace.rehearsal import Rehearsal
from lightning_3d.plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A training with its plan.

    Attributes:
        training: The training.
        plan: Its plan.
        parts: The micro-batches of a batch.
        sizes: Samples of each.
        kinds: What decides which way the step takes with each.
        records: What the step does with each kind; empty without a pipeline axis.
        played: How many micro-batches are played: all, or on one rank as many as the others repeat.
        plays_all: Those are played too that do what others have done.
    """

    training: Training
    plan: Plan
    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Hashable, ...]
    records: Mapping[Hashable, StepRecord]
    played: int
    plays_all: bool

    @property
    def scheduled(self) -> tuple[int, int]:
        """Micro-batches that the schedule runs for those that are played, and for all."""
        config = self.training.config
        played, needed = (
            runnable_microbatches(config.pipeline_schedule, ranks=config.pipeline_parallel_size, microbatches=count)
            for count in (self.played, len(self.parts))
        )
        return played, needed

    def on(self, rank: int) -> Planned:
        """Returns the same with as many micro-batches as have to be played on a pipeline rank."""
        if self.plays_all or len(set(self.kinds)) > 1:
            return self
        return replace(self, played=enough_microbatches(self.training.config, len(self.parts), rank))


def planned(training: Training, *, all_microbatches: bool = False) -> Planned:
    """Returns the plan of a training: the one that its ranks would make.

    Args:
        training: The training.
        all_microbatches: Play those too that do what others have done.

    Raises:
        Lightning3DError: What the strategy would refuse.
    """
    module = training.built()
    micro = MicroBatches(module, training.config)
    sizes = micro.sizes(training.batch)
    parts = tuple(micro.split(training.batch, sizes))
    pipelined = training.mesh.pipeline > 1
    first = parts[0] if pipelined else training.batch
    plan = make_plan(
        module,
        training.mesh,
        training.config,
        casts=training.dtypes.shards_cast,
        step=training.step_of(module, first),
    )
    kinds = tuple(signature(part, size if len(sizes) > 1 else None) for part, size in zip(parts, sizes, strict=True))
    of_kind = dict(reversed(list(zip(kinds, parts, strict=True))))
    records = {}
    if pipelined:
        computing = _as_it_computes(training, plan, module)
        records = {kind: _recorded(training, plan, computing, part) for kind, part in of_kind.items()}
    return Planned(
        training=training,
        plan=plan,
        parts=parts,
        sizes=sizes,
        kinds=kinds,
        records=records,
        played=len(parts),
        plays_all=all_microbatches,
    )


def enough_microbatches(config: StrategyConfig, count: int, rank: int) -> int:
    """Returns of how many equal micro-batches a step has to be made to see all that a step of more has.

    Without a pipeline: a first, one in the middle, a last. One forward one backward repeats itself on a rank from the
    second backward on: gradients are there, and as many micro-batches wait as there are stages from this one on. In the
    other schedules each micro-batch counts: all forwards come first, or what was sent is held until the step ends.

    Args:
        config: The strategy's options.
        count: Micro-batches of a batch.
        rank: The pipeline rank.
    """
    ranks = config.pipeline_parallel_size
    if ranks > 1 and config.pipeline_schedule != "1f1b":
        return count
    return min(count, max(3, ranks - rank + 1))


def _as_it_computes(training: Training, plan: Plan, module: LightningModule) -> LightningModule:
    """The module with parameters of the dtype in which they are gathered; buffers are not cast."""
    dtype = training.dtypes.fsdp_policy().param_dtype
    if dtype is None:
        return module
    kept = {name for unit in plan.data.units if unit.keeps_precision for name in unit.modules}
    cast: dict[int, nn.Parameter] = {}
    for name, child in module.named_modules():
        if name in kept:
            continue
        for key, parameter in child._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                child._parameters[key] = cast[id(parameter)]
    return module


def _recorded(training: Training, plan: Plan, module: LightningModule, part: Any) -> StepRecord:
    """What ranks record together before their first batch: here one rank runs the whole module without values."""
    recorder = pipeline_observer(module, plan.parameters, plan.stacks, training.config)
    observers: list[Observer] = [recorder]
    tensor = plan.tensor
    if tensor is not None:
        # Hidden values are cut between stages as they are on a tensor rank.
        observers.append(
            Rehearsal(
                plan.parameters,
                tensor.size,
                plan.layouts,
                partial=tensor.partial,
                regions=tensor.regions,
                sequence=tensor.sequence,
            )
        )
    fake_run(module, recorder.heard(training.step_of(module, part)), stacks=plan.stacks, observers=observers)
    return recorder.record
