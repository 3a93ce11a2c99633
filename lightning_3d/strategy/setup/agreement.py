"""What all ranks must know alike before a module is cut: the plan, and whether it was proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.errors import Lightning3DError, PlanError
from lightning_3d.initial.replay import InitTape
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.prove import startup_proof
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof, Skipped
from lightning_3d.plan import Plan
from lightning_3d.strategy.setup.first_step import FirstStep


def agreed_plan(plan: Plan, group: dist.ProcessGroup) -> Plan:
    """Returns the first rank's plan, once every rank has found the same. A collective.

    Args:
        plan: This rank's.
        group: All ranks of the mesh.

    Raises:
        PlanError: On every rank: names the first parameter that some rank would hold in another way.
    """
    if plan.tensor is None or group.size() == 1:
        return plan
    plans: list[TensorPlan] = gather(group, plan.tensor)
    first = plans[0]
    for rank, other in enumerate(plans):
        for mine, theirs in zip(first.rows, other.rows, strict=True):
            if (mine.name, mine.layout) != (theirs.name, theirs.layout):
                raise PlanError(
                    f"ranks 0 and {rank} plan '{mine.name}' in different ways: {mine.style}, {mine.layout}, and "
                    f"{theirs.style}, {theirs.layout}.",
                    fix="run the same code on all ranks, and take the same branches for the first batch; or say how: "
                    f"tensor_plan={{{mine.name!r}: {mine.style!r}}}",
                )
    return replace(plan, tensor=first)


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
