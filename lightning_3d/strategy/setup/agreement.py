"""What all ranks must know alike before a module is cut: the plan, and whether it was proved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.errors import Lightning3DError, ModuleError, PlanError
from lightning_3d.initial.replay import InitTape
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.prove import startup_proof
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof, Skipped
from lightning_3d.plan import Plan
from lightning_3d.strategy.setup.first_step import FirstStep
from lightning_3d.strategy.setup.program import differing, unlike

_SAME_CODE = "run the same code on all ranks, and take the same branches for the first batch"


def agreed_plan(plan: Plan, group: dist.ProcessGroup) -> Plan:
    """Returns the first rank's plan, once every rank has found the same. A collective.

    Args:
        plan: This rank's.
        group: All ranks of the mesh.

    Raises:
        ModuleError: On every rank: the ranks have built different modules.
        PlanError: On every rank: names the first parameter that some rank would hold in another way, or the stage that
            would be another one.
    """
    if group.size() == 1:
        return plan
    _check_same_parameters(plan, group)
    _check_same_stages(plan, group)
    if plan.tensor is None:
        return plan
    plans: list[TensorPlan] = gather(group, plan.tensor)
    first = plans[0]
    for rank, other in enumerate(plans):
        for mine, theirs in zip(first.rows, other.rows, strict=True):
            if (mine.name, mine.layout) != (theirs.name, theirs.layout):
                raise PlanError(
                    f"ranks 0 and {rank} plan '{mine.name}' in different ways: {mine.style}, {mine.layout}, and "
                    f"{theirs.style}, {theirs.layout}.",
                    fix=f"{_SAME_CODE}; or say how: tensor_plan={{{mine.name!r}: {mine.style!r}}}",
                )
    return replace(plan, tensor=first)


def _check_same_parameters(plan: Plan, group: dist.ProcessGroup) -> None:
    shown = {row.names[0]: f"{row.shape} {row.dtype}" for row in plan.parameters.rows}
    shown |= {name: f"tied to {row.names[0]}" for row in plan.parameters.rows for name in row.names[1:]}
    found = _first_difference(shown, group)
    if found is not None:
        raise ModuleError(
            f"the ranks have built different modules: '{found[0]}' is {found[1]}.",
            fix="build the same module on all ranks; what depends on the rank belongs into its data",
        )


def _check_same_stages(plan: Plan, group: dist.ProcessGroup) -> None:
    shown: dict[str, str] = {}
    if plan.pipeline is not None:
        blocks = plan.pipeline.blocks
        shown = {f"stage {each.index}": ", ".join(blocks[each.first : each.end]) for each in plan.pipeline.stages}
        shown |= {name: f"on stages {stages}" for name, stages in plan.pipeline.holders.items()}
    found = _first_difference(shown, group)
    if found is not None:
        raise PlanError(
            f"the ranks plan the pipeline in different ways: {found[0]} is {found[1]}.",
            fix=f"{_SAME_CODE}; or say how: layers_per_stage=[...]",
        )


def _first_difference(shown: Mapping[str, str], group: dist.ProcessGroup) -> tuple[str, str] | None:
    """Returns the first name that does not stand for the same on all ranks, and what it stands for. A collective."""
    everyone = differing(shown, group)
    if everyone is None:
        return None
    name, values = next(unlike(everyone))
    return name, ", ".join(values)


def agreed_proof(
    module: LightningModule, plan: TensorPlan, step: FirstStep, tape: InitTape | None, group: dist.ProcessGroup
) -> Proof | Skipped:
    """Returns what the first rank has proved of a plan, or why it has not. A collective.

    Args:
        module: The whole module, untouched.
        plan: The plan of its tensor axis.
        step: The first step.
        tape: Recorded initialisation of a module on the meta device.
        group: All ranks of the mesh.

    Raises:
        PlanError: On every rank: the plan computes something else than one device.
    """
    found: list[Any] = [None]
    if group.rank() == 0:
        try:
            values = None if tape is None else tape.value
            found = [startup_proof(module, StepCall(method=step.method, args=step.args), plan, values=values)]
        except Lightning3DError as error:
            found = [error]
    if group.size() > 1:
        dist.broadcast_object_list(found, group_src=0, group=group)
    if isinstance(found[0], Lightning3DError):
        raise found[0]
    result: Proof | Skipped = found[0]
    return result
