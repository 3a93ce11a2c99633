"""What all ranks of a dry run have in common: the plan, the micro-batches, and what a step does with each kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.batches.signature import signature
from lightning_3d.dryrun.training import Training
from lightning_3d.graph.fake_run import fake_run
from lightning_3d.graph.observer import Observer
from lightning_3d.parallel.pipeline.planning import pipeline_observer
from lightning_3d.parallel.pipeline.record.step import StepRecord
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
    """

    training: Training
    plan: Plan
    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Hashable, ...]
    records: Mapping[Hashable, StepRecord]


def planned(training: Training) -> Planned:
    """Returns the plan of a training: the one that its ranks would make.

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
    records = {kind: _recorded(training, plan, module, part) for kind, part in of_kind.items()} if pipelined else {}
    return Planned(training=training, plan=plan, parts=parts, sizes=sizes, kinds=kinds, records=records)


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
