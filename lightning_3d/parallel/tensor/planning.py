"""From a module and its step to the plan of its tensor axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.graph.blocks import Stack
from lightning_3d.graph.fake_run import fake_run
from lightning_3d.graph.observer import Observer
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.tensor.hints import hinted_regions
from lightning_3d.parallel.tensor.overrides import Overrides, plan_overrides
from lightning_3d.parallel.tensor.plan import TensorPlan, plan_tensor
from lightning_3d.parallel.tensor.regions.plan import Region, RegionPlan, plan_regions, region_candidates
from lightning_3d.parallel.tensor.trace.observer import TensorTrace, Traced
from lightning_3d.parallel.tensor.trace.rehearsal import Rehearsal
from lightning_3d.parallel.tensor.twins import UsedParameters, with_twins

Step = Callable[[], Any]


def find_tensor_plan(
    module: LightningModule,
    step: Step,
    *,
    parameters: ParameterTable,
    stacks: Sequence[Stack],
    size: int,
    tensor_plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    pad_vocabulary: bool = False,
) -> TensorPlan:
    """Returns the plan of an untouched module.

    The user's `tensor_plan` goes before what a run of the step shows; a model's own hints count for experts only, and
    where they are proved.

    Args:
        module: The whole module, real or on the meta device.
        step: Calls the user's step with a real batch.
        parameters: The module's parameters.
        stacks: Its stacks of blocks.
        size: Number of tensor-parallel ranks.
        tensor_plan: The user's globs and styles.
        sequence: Sequence parallelism.
        pad_vocabulary: Whether a vocabulary that the ranks do not divide is padded and cut.

    Raises:
        PlanError: A glob or style of the user is wrong, or nothing can be cut.
        ModuleError: The step cannot run without values.
    """
    overrides = plan_overrides(module, parameters, tensor_plan, size, pad_vocabulary=pad_vocabulary)
    hinted = hinted_regions(module)
    sampled = [candidate.module for candidate in region_candidates(module, overrides, hinted)]
    trace = partial(_traced, module, step, parameters, stacks, overrides, pad_vocabulary)
    used = UsedParameters(parameters)
    traced = trace(size, sampled=sampled, observers=[used])
    candidates = region_candidates(module, overrides, hinted, traced.reads)
    regions = RegionPlan()
    if candidates:
        regions = plan_regions(module, parameters, candidates, traced.calls, size, replicated=overrides.replicated)
    if regions.regions:
        traced = trace(size, regions=regions.regions)
    plan = plan_tensor(
        parameters,
        traced,
        overrides=overrides,
        regions=regions,
        hinted=hinted,
        sequence=sequence,
        useful=lambda degree: bool(trace(degree).styles),
    )
    plan = with_twins(plan, module, parameters, used.names)
    rehearse = partial(_rehearsed, module, step, parameters, stacks)
    if sequence:
        # Cut sequences are met by other parameters than whole ones.
        plan = dataclasses.replace(plan, partial=rehearse(dataclasses.replace(plan, partial=frozenset())).partial())
    rehearsal = rehearse(plan)
    return dataclasses.replace(plan, partial=plan.partial | _in_regions(plan), traffic=dict(rehearsal.traffic))


def _rehearsed(
    module: LightningModule, step: Step, parameters: ParameterTable, stacks: Sequence[Stack], plan: TensorPlan
) -> Rehearsal:
    rehearsal = Rehearsal(
        parameters,
        plan.size,
        plan.layouts,
        partial=plan.partial,
        regions=plan.regions,
        sequence=plan.sequence,
    )
    fake_run(module, step, stacks=stacks, observers=[rehearsal])
    return rehearsal


def _in_regions(plan: TensorPlan) -> frozenset[str]:
    """What local regions hold whole: they use it on their part of the work."""
    prefixes = tuple(f"{region.module}." for region in plan.regions)
    return frozenset(row.name for row in plan.rows if row.layout is None and row.name.startswith(prefixes))


def _traced(
    module: LightningModule,
    step: Step,
    parameters: ParameterTable,
    stacks: Sequence[Stack],
    overrides: Overrides,
    pad_vocabulary: bool,
    size: int,
    *,
    sampled: Collection[str] = (),
    regions: Sequence[Region] = (),
    observers: Sequence[Observer] = (),
) -> Traced:
    trace = TensorTrace(
        parameters,
        size,
        forced={name: style for name, style in overrides.styles.items() if style.kind != "replicate"},
        forbidden={
            name: f"tensor_plan[{style.glob!r}]='replicate'"
            for name, style in overrides.styles.items()
            if style.kind == "replicate"
        },
        regions=regions,
        sampled=sampled,
        pad_vocabulary=pad_vocabulary,
    )
    fake_run(module, step, stacks=stacks, observers=[*observers, trace])
    return trace.found()
