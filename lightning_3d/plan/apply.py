"""The order in which a plan is applied to a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.gradients import PipelineShare
from lightning_3d.graph.parameters import marks_kept
from lightning_3d.initial.broadcast import broadcast_module
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.replay import InitTape
from lightning_3d.initial.tensors import named_tensors
from lightning_3d.mesh.device import data_axis_mesh, data_mesh, pipeline_mesh, tensor_mesh
from lightning_3d.mesh.spec import TENSOR_AXIS
from lightning_3d.parallel.data.apply import apply_data, apply_stage_data
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.scalars import move_scalars
from lightning_3d.parallel.pipeline.apply import AppliedStages, apply_pipeline
from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.parallel.pipeline.presence import presence_of
from lightning_3d.parallel.pipeline.run.hooks import forward_hooks
from lightning_3d.parallel.pipeline.run.runs import PipelineRuns
from lightning_3d.parallel.pipeline.shared import SharedGradients
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.plan.engine import MeshEngine
from lightning_3d.plan.make import Plan
from lightning_3d.plan.stages import StagesOnRank
from lightning_3d.random.streams import RandomStreams
from lightning_3d.shards.group import ProcessShardGroup, ShardOptions
from lightning_3d.shards.presence import Presence
from lightning_3d.shards.resting import let_rest


def apply_plan(
    module: LightningModule,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    world: dist.ProcessGroup,
    device: torch.device,
    tape: InitTape | None = None,
    policy: MixedPrecisionPolicy | None = None,
    streams: RandomStreams | None = None,
    exact_random: bool = False,
    partial_gradients: bool = True,
    send_values: bool = True,
) -> MeshEngine:
    """Turns ``module`` in place into this rank's part of it, and returns the engine that runs its steps.

    Stages are cut first, so that nothing is made of what other ranks own; then tensors, then what remains over the
    data axis; values come last.

    Args:
        module: The module that the plan was made for.
        plan: The plan, equal on all ranks.
        mesh: The DeviceMesh of ``plan.mesh``.
        world: All ranks of it.
        device: This rank's device.
        tape: Recorded initialisation, if the module is on the meta device.
        policy: Dtypes of gathered parameters and of reductions.
        streams: Random streams of the module's parts.
        exact_random: Dropout on the tensor axis draws the masks of one device.
        partial_gradients: Gradients of weights that are used on parts are summed once for each optimizer step; False
            where something reads them before.
        send_values: All ranks get the first one's values; False where there are none.
    """
    if world.size() > 1 and send_values:
        # What is real already; what is recorded needs no communication.
        broadcast_module(module, world)
    hooks = forward_hooks(module)
    presence, stages = _cut_stages(module, plan, mesh, device)
    absent = frozenset[str]() if presence is None else presence.absent
    tensor = _cut_tensors(
        module,
        plan,
        mesh,
        device=device,
        exact_random=exact_random,
        partial=partial_gradients,
        absent=absent,
    )
    data = _apply_data(module, plan, mesh, stages, device=None if tape is not None else device, policy=policy)
    if tape is not None:
        parameters_on = torch.device("cpu") if plan.data.cpu_offload else None
        materialise(module, tape, device=device, parameters_on=parameters_on, layouts=plan.layouts, absent=absent)
    let_rest(module, plan.layouts, TENSOR_AXIS)
    if tensor is not None:
        tensor.settle()
    if stages is None or presence is None:
        return MeshEngine(data, tensor)
    runs = _runs(module, plan, presence, hooks, streams, tensor)
    return MeshEngine(data, tensor, _stages(module, plan, mesh, stages, presence, runs))


def _cut_stages(
    module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device
) -> tuple[Presence | None, AppliedStages | None]:
    """Frees what other pipeline ranks own; says who has what, and has a module for each stage of this rank."""
    if plan.pipeline is None:
        return None, None
    group = pipeline_mesh(mesh).get_group()
    return presence_of(plan.pipeline, group, device), apply_pipeline(module, plan.pipeline, group.rank(), device)


def _cut_tensors(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    exact_random: bool,
    partial: bool,
    absent: frozenset[str],
) -> TensorState | None:
    """Cuts the parameters that are present over the tensor axis."""
    if plan.tensor is None:
        return None
    axis = tensor_mesh(mesh)
    options = ShardOptions(sequence=plan.tensor.sequence, exact_random=exact_random)
    return apply_tensor(
        module,
        plan.layouts,
        axis,
        ProcessShardGroup(axis.get_group(), options),
        device=device,
        partial=plan.tensor.partial if partial else (),
        absent=absent,
    )


def _apply_data(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    stages: AppliedStages | None,
    *,
    device: torch.device | None,
    policy: MixedPrecisionPolicy | None,
) -> DataEngine:
    """Shards the module, or each stage of this rank, once what is real lies on the device."""
    if device is not None and plan.data.engine != "fully_shard":
        _move(module, device)
    elif device is not None:
        move_scalars(module, device)
    axis = data_mesh(mesh) if plan.data.zero_stage else data_axis_mesh(mesh)
    if stages is None:
        return apply_data(module, plan.data, axis, policy=policy)
    return apply_stage_data(stages.stages, module, plan.data, axis, policy=policy)


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves what has memory, if any of it lies elsewhere; parameters that other ranks hold have none."""
    here = (device, torch.device("meta"))
    if all(tensor.device in here for _, tensor in named_tensors(module)):
        return
    with marks_kept(module):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _runs(
    module: LightningModule,
    plan: Plan,
    presence: Presence,
    hooks: Mapping[str, frozenset[int]],
    streams: RandomStreams | None,
    tensor: TensorState | None,
) -> PipelineRuns:
    assert plan.pipeline is not None
    return PipelineRuns(
        module,
        plan.pipeline,
        presence.rank,
        presence.group,
        hooks=hooks,
        device=presence.device,
        streams=streams,
        tensor_group=None if tensor is None else tensor.group,
    )


def _stages(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    applied: AppliedStages,
    presence: Presence,
    runs: PipelineRuns,
) -> StagesOnRank:
    pipeline, device = plan.pipeline, presence.device
    assert pipeline is not None
    engine = PipelineEngine(
        pipeline,
        applied.stages,
        runs,
        presence.group,
        device,
        whole_backward=plan.whole_backward,
        lazy_units=plan.data.engine == "fully_shard" and plan.data.zero_stage == 3,
    )
    gradients = SharedGradients(dict(module.named_parameters()), pipeline.shared, mesh, device=device)
    share = PipelineShare(ranks=pipeline.ranks, holders=gradients.holders, device=device)
    return StagesOnRank(engine=engine, runs=runs, gradients=gradients, share=share, presence=presence)
