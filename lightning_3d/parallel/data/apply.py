"""Applying a DataPlan to a module: sharding it in place, and choosing the engine that runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_3d.graph.parameters import marks_kept
from lightning_3d.parallel.data.ddp import DDPEngine
from lightning_3d.parallel.data.door import units_of
from lightning_3d.parallel.data.engine import DataEngine, PlainEngine
from lightning_3d.parallel.data.hooks import GradientHooks
from lightning_3d.parallel.data.plan import DataPlan, ShardUnit, stage_units
from lightning_3d.parallel.data.scalars import ScalarGradients, scalar_parameters
from lightning_3d.parallel.data.stages import StageEngine
from lightning_3d.parallel.data.units import UnitEngine
from lightning_3d.parallel.data.zero import ZeroStage

Shard = Callable[[Any, bool, MixedPrecisionPolicy], FSDPModule]


def apply_data(
    module: nn.Module,
    plan: DataPlan,
    mesh: DeviceMesh | None,
    *,
    policy: MixedPrecisionPolicy | None = None,
) -> DataEngine:
    """Shards ``module`` in place by the plan and returns the engine that runs its steps.

    Args:
        module: The module; its parameters hold equal values on all data ranks, or are on the meta device. Plain ones,
            or DTensors of the tensor axis.
        plan: The decision.
        mesh: The data axis, replicas x shards for hybrid sharding; None without a process group.
        policy: Dtypes of gathered parameters and of reductions, for engines that work by units.
    """
    if plan.engine == "none":
        return PlainEngine()
    assert mesh is not None, "every other engine reduces over a data axis"
    if plan.engine == "ddp":
        return DDPEngine(module, mesh)
    hooks = GradientHooks(module)
    scalars = scalar_parameters(module)
    stage, cast = ZeroStage(stage=plan.zero_stage), policy or MixedPrecisionPolicy()
    shard = _sharder(plan, mesh, whole=set(scalars))
    with marks_kept(module):
        _shard_units(module, plan.units, shard, stage, cast)
        root = shard(module, False, cast)
    hooks.carry(units_of(root))
    return UnitEngine(
        root,
        stage,
        sharded=plan.engine == "fully_shard",
        scalars=ScalarGradients(scalars, mesh),
    )


def apply_stage_data(
    stages: Mapping[int, nn.Module],
    module: nn.Module,
    plan: DataPlan,
    mesh: DeviceMesh | None,
    *,
    policy: MixedPrecisionPolicy | None = None,
) -> DataEngine:
    """Shards the stages that a rank owns in place by the plan and returns the engine that runs their steps.

    Each parameter is managed once on a rank. One that several of its stages hold belongs to the root of the lowest,
    which stays gathered as long as any of them computes.

    Args:
        stages: The rank's stages by their index: modules that register what the stage calls and, for each parameter
            of it, all places in ``module`` where it lies.
        module: The whole module, for the names in the plan.
        plan: The decision, made for the whole module.
        mesh: The data axis, replicas x shards for hybrid sharding; None without a process group.
        policy: Dtypes of gathered parameters and of reductions.
    """
    if plan.engine == "none":
        return PlainEngine()
    assert mesh is not None, "every other engine reduces over a data axis"
    assert plan.engine != "ddp", "DDP serves one forward for each backward in turn, schedules several"
    scalars = list(dict.fromkeys(scalar for stage in stages.values() for scalar in scalar_parameters(stage)))
    hooks = GradientHooks(module)
    zero, cast = ZeroStage(stage=plan.zero_stage), policy or MixedPrecisionPolicy()
    # What goes from stage to stage is computed already; the engine casts the inputs of a step.
    root_cast = replace(cast, cast_forward_inputs=False)
    apart = _names_in_several(stages.values(), module)
    before = _places(module)
    managed, roots = set(scalars), []
    with marks_kept(module):
        for index in sorted(stages):
            shard = _sharder(plan, mesh, whole=managed)
            units = stage_units(plan.units, modules=_names_within(stages[index], module), apart=apart)
            _shard_units(module, units, shard, zero, cast)
            roots.append(shard(stages[index], False, root_cast))
            managed = managed | set(stages[index].parameters())
    hooks.carry(unit for root in roots for unit in units_of(root))
    assert _places(module) == before, "a stage registers every place of its parameters"
    return StageEngine(roots, zero, scalars=ScalarGradients(scalars, mesh), cast=cast.param_dtype)


def _names_within(stage: nn.Module, module: nn.Module) -> set[str]:
    """The modules that a stage registers, by their names in the whole module."""
    registered = set(stage.modules())
    return {name for name, child in module.named_modules() if child in registered}


def _names_in_several(stages: Iterable[nn.Module], module: nn.Module) -> set[str]:
    """All names of parameters that more than one of the stages hold."""
    held = [set(stage.parameters()) for stage in stages]
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if sum(parameter in parameters for parameters in held) > 1}


def _places(module: nn.Module) -> set[frozenset[str]]:
    """The names of each parameter."""
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    return set(map(frozenset, names.values()))


def _shard_units(
    module: nn.Module, units: Iterable[ShardUnit], shard: Shard, stage: ZeroStage, cast: MixedPrecisionPolicy
) -> None:
    for unit in units:
        parts = [module.get_submodule(name) for name in unit.modules]
        own = MixedPrecisionPolicy(cast_forward_inputs=False) if unit.keeps_precision else cast
        shard(parts if len(parts) > 1 else parts[0], stage.reshard_blocks_after_forward, own)


def _sharder(plan: DataPlan, mesh: DeviceMesh, *, whole: set[nn.Parameter]) -> Shard:
    if plan.engine == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        def copy(module: Any, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> FSDPModule:
            copied: FSDPModule = replicate(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
            return copied

        return copy
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if plan.cpu_offload else OffloadPolicy()

    def cut(module: Any, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> FSDPModule:
        cut_module: FSDPModule = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
        return cut_module

    return cut
