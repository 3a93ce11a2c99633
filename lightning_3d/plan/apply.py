"""The order in which a plan is applied to a module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.graph.parameters import marks_kept
from lightning_3d.initial.broadcast import broadcast_module
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.replay import InitTape
from lightning_3d.mesh.device import data_axis_mesh, data_mesh, tensor_mesh
from lightning_3d.mesh.spec import TENSOR_AXIS
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.scalars import move_scalars
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.plan.engine import MeshEngine
from lightning_3d.plan.make import Plan
from lightning_3d.shards.group import ProcessShardGroup, ShardOptions
from lightning_3d.shards.resting import let_rest


def apply_plan(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    world: dist.ProcessGroup,
    device: torch.device,
    tape: InitTape | None = None,
    policy: MixedPrecisionPolicy | None = None,
    exact_random: bool = False,
    partial_gradients: bool = True,
) -> MeshEngine:
    """Turns ``module`` in place into this rank's part of it, and returns the engine that runs its steps.

    Args:
        module: The module that the plan was made for.
        plan: The plan, equal on all ranks.
        mesh: The DeviceMesh of ``plan.mesh``.
        world: All ranks of it.
        device: This rank's device.
        tape: Recorded initialisation, if the module is on the meta device.
        policy: Dtypes of gathered parameters and of reductions.
        exact_random: Dropout on the tensor axis draws the masks of one device.
        partial_gradients: Gradients of weights that are used on parts are summed once for each optimizer step; False
            where something reads them before.
    """
    if world.size() > 1:
        # What is real already; what is recorded needs no communication.
        broadcast_module(module, world)
    tensor = None
    if plan.tensor is not None:
        axis = tensor_mesh(mesh)
        options = ShardOptions(sequence=plan.tensor.sequence, exact_random=exact_random)
        tensor = apply_tensor(
            module,
            plan.layouts,
            axis,
            ProcessShardGroup(axis.get_group(), options),
            device=device,
            partial=plan.tensor.partial if partial_gradients else (),
        )
    if tape is None and plan.data.engine != "fully_shard":
        with marks_kept(module):
            module.to(device)
    elif tape is None:
        move_scalars(module, device)
    data_axis = data_mesh(mesh) if plan.data.zero_stage else data_axis_mesh(mesh)
    data = apply_data(module, plan.data, data_axis, policy=policy)
    if tape is not None:
        parameters_on = torch.device("cpu") if plan.data.cpu_offload else None
        materialise(module, tape, device=device, parameters_on=parameters_on, layouts=plan.layouts)
    let_rest(module, plan.layouts, TENSOR_AXIS)
    if tensor is not None:
        tensor.settle()
    return MeshEngine(data, tensor)
