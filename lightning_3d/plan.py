"""The order of composition: from a module and a mesh to a Plan, and from the Plan to a module that trains on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.graph.blocks import Stack, containers, find_stacks, modules_with_statistics, outer_modules
from lightning_3d.graph.calls import around_calls, plain_calls
from lightning_3d.graph.parameters import ParameterTable, parameter_table
from lightning_3d.initial.broadcast import broadcast_module
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.replay import InitTape
from lightning_3d.mesh.device import data_axis_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.plan import DataPlan, plan_data
from lightning_3d.parallel.data.scalars import move_scalars
from lightning_3d.random.streams import RandomStreams


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is decided before a module is touched.

    Attributes:
        mesh: Degrees of the axes.
        parameters: The module's parameters under all their names.
        stacks: Its stacks of blocks.
        data: The data axis.
    """

    mesh: MeshSpec
    parameters: ParameterTable
    stacks: tuple[Stack, ...]
    data: DataPlan

    def __str__(self) -> str:
        stacks = ", ".join(str(stack) for stack in self.stacks) or "none found"
        rows = {"mesh": self.mesh, "model": self.parameters, "stacks": stacks, "data axis": self.data}
        return "\n".join(f"{title:<10} {row}" for title, row in rows.items())


def make_plan(
    module: nn.Module, mesh: MeshSpec, config: StrategyConfig, *, casts: bool = False, backward_inside: bool = False
) -> Plan:
    """Returns the plan for an untouched module.

    Args:
        module: The whole module, real or on the meta device.
        mesh: Degrees of the axes.
        config: The strategy's options.
        casts: Parameters are cast as they gather.
        backward_inside: Steps run backward themselves (manual optimization).
    """
    parameters = parameter_table(module)
    stacks = find_stacks(module)
    data = plan_data(
        parameters,
        stacks,
        zero_stage=config.zero_stage,
        data_size=mesh.data,
        unit_blocks=config.unit_blocks,
        cpu_offload=config.cpu_offload,
        needs_units=casts or backward_inside,
        full_precision=modules_with_statistics(module) if casts else (),
    )
    return Plan(mesh=mesh, parameters=parameters, stacks=stacks, data=data)


def apply_plan(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    tape: InitTape | None = None,
    policy: MixedPrecisionPolicy | None = None,
) -> DataEngine:
    """Turns ``module`` in place into this rank's part of it, and returns the engine that runs its steps.

    Args:
        module: The module that the plan was made for.
        plan: The plan, equal on all ranks.
        mesh: The DeviceMesh of ``plan.mesh``.
        device: This rank's device.
        tape: Recorded initialisation, if the module is on the meta device.
        policy: Dtypes of gathered parameters and of reductions.
    """
    axis = data_axis_mesh(mesh)
    if axis.size() > 1:
        # What is real already; what is recorded needs no communication.
        broadcast_module(module, axis.get_group())
    if tape is None and plan.data.engine != "fully_shard":
        module.to(device)
    elif tape is None:
        move_scalars(module, device)
    engine = apply_data(module, plan.data, data_mesh(mesh) if plan.data.zero_stage else axis, policy=policy)
    if tape is not None:
        materialise(module, tape, device=device, parameters_on=torch.device("cpu") if plan.data.cpu_offload else None)
    return engine


def watch_calls(module: nn.Module, plan: Plan, engine: DataEngine, streams: RandomStreams | None) -> None:
    """Makes calls of the module's parts work anywhere, and blocks and outer modules draw from streams of their own.

    Inside a step the root's parameters are gathered. Outside, in a hook or a callback, the outermost call of any part
    gathers them. Streams carry the name that a part has in the module.

    Args:
        module: A module to which ``plan`` was applied.
        plan: Knows its stacks.
        engine: Gathers what a call needs.
        streams: None leaves randomness to torch's generator.
    """
    around_calls(module, engine.visit)
    for name in containers(module, plan.stacks):
        around_calls(module.get_submodule(name), engine.visit)
    blocks = (block for stack in plan.stacks for block in stack.blocks)
    for name in (*blocks, *outer_modules(module, plan.stacks)):
        around_calls(module.get_submodule(name), engine.visit if streams is None else _drawing(engine, streams, name))


def unwatch_calls(module: nn.Module) -> None:
    """Undoes `watch_calls`."""
    for child in module.modules():
        plain_calls(child)


def _drawing(engine: DataEngine, streams: RandomStreams, name: str) -> Callable[[Callable[[], Any]], Any]:
    def handler(call: Callable[[], Any]) -> Any:
        with streams.stream(name):
            return engine.visit(call)

    return handler
