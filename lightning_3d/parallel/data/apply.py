"""Applying a DataPlan to a module: sharding it in place, and choosing the engine that runs its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_3d.graph.parameters import marks_kept
from lightning_3d.parallel.data.ddp import DDPEngine
from lightning_3d.parallel.data.engine import DataEngine, PlainEngine
from lightning_3d.parallel.data.plan import DataPlan
from lightning_3d.parallel.data.scalars import ScalarGradients, scalar_parameters
from lightning_3d.parallel.data.units import UnitEngine
from lightning_3d.parallel.data.zero import ZeroStage


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
    scalars = scalar_parameters(module)
    stage, cast = ZeroStage(stage=plan.zero_stage), policy or MixedPrecisionPolicy()
    shard = _sharder(plan, mesh, whole=set(scalars))
    with marks_kept(module):
        for unit in plan.units:
            parts = [module.get_submodule(name) for name in unit.modules]
            own = MixedPrecisionPolicy(cast_forward_inputs=False) if unit.keeps_precision else cast
            shard(parts if len(parts) > 1 else parts[0], stage.reshard_blocks_after_forward, own)
        root = shard(module, False, cast)
    return UnitEngine(
        root,
        stage,
        sharded=plan.engine == "fully_shard",
        scalars=ScalarGradients(scalars, mesh),
    )


def _sharder(
    plan: DataPlan, mesh: DeviceMesh, *, whole: set[nn.Parameter]
) -> Callable[[Any, bool, MixedPrecisionPolicy], FSDPModule]:
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
