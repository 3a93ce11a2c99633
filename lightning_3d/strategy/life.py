"""A module's life on a mesh: what is refused before it is touched, and what it has become afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_3d.checkpoint.layout import every_name
from lightning_3d.checkpoint.structure import Structure
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ModuleError, few_and_more
from lightning_3d.graph.beside import kept_beside
from lightning_3d.graph.compiled import compiled_parts
from lightning_3d.graph.compiling import check_compiler
from lightning_3d.graph.on_device import on_device
from lightning_3d.graph.parameters import class_name
from lightning_3d.initial.broadcast import BufferBroadcast
from lightning_3d.initial.replay import InitTape
from lightning_3d.log import told_if_slow
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.normalisation import normalise_over_ranks
from lightning_3d.parallel.pipeline.report import PipelineReport
from lightning_3d.parallel.tensor.proof.result import Proof, Skipped
from lightning_3d.parallel.tensor.replay.block import BlockReport
from lightning_3d.plan import MeshEngine, ModuleCopies, Plan, ReplayOptions, apply_plan, make_plan, watch_calls
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.shards.hook_values import Holders
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence
from lightning_3d.strategy.run import RunOnMesh
from lightning_3d.strategy.setup.agreement import agreed_plan, agreed_proof
from lightning_3d.strategy.setup.doors import ModuleDoors
from lightning_3d.strategy.setup.first_step import FirstStep
from lightning_3d.strategy.setup.hooks import hook_values
from lightning_3d.strategy.setup.watching import share_gradient_hooks

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """A module after its plan was applied.

    Attributes:
        module: The module itself; its parameters are this rank's part.
        plan: The plan that was applied.
        engine: Runs its steps.
        share_buffers: Gives every data rank the running statistics of the first.
        copies: Copies of it that stand beside it.
        doors: Its methods that know the mesh, while a Trainer runs it.
        layouts: How the tensor axis cuts parameters, by every name that a checkpoint has for them.
        structure: Which classes it is made of, for checkpoints.
        proof: Whether the plan of its tensor axis was proved; None without one.
        presence: What the ranks of its pipeline have; None without a pipeline axis.
        pipeline_report: What its pipeline costs; None without a pipeline axis.
    """

    module: LightningModule
    plan: Plan
    engine: MeshEngine
    share_buffers: Callable[[], None]
    copies: ModuleCopies
    doors: ModuleDoors
    layouts: Mapping[str, Layout]
    structure: Structure
    proof: Proof | Skipped | None = None
    presence: Presence | None = None
    pipeline_report: PipelineReport | None = None

    def __str__(self) -> str:
        lines = [str(self.plan)]
        lines += [str(self.pipeline_report)] if self.pipeline_report is not None else []
        lines += [f"proof      {self.proof}"] if self.proof is not None else []
        lines += [f"replay     {line}" for line in _folded(self.engine.reports())]
        return "\n".join(lines)


def apply_module(
    module: LightningModule,
    run: RunOnMesh,
    *,
    spec: MeshSpec,
    config: StrategyConfig,
    precision: Mesh3DPrecision,
    tape: InitTape | None,
    step: FirstStep | None = None,
) -> AppliedModule:
    """Makes a whole module this rank's part of it.

    Args:
        module: The user's module, real or on the meta device.
        run: The mesh of this process.
        spec: Degrees of the axes.
        config: The strategy's options.
        precision: Converts the module, and says how gathered parameters are cast.
        tape: Recorded initialisation of a module on the meta device.
        step: The first step of the run, for axes that are planned by what it computes.

    Raises:
        ConfigError: Blocks are to be compiled, and the machine cannot.
        ModuleError: It is cut already, or on the meta device without a recording.
    """
    _check(module, run.device, spec=spec, config=config, tape=tape)
    structure, beside = Structure.of(module), kept_beside(getattr(module._trainer, "callbacks", ()), module)
    precision.convert_module(module)
    plan = _planned(module, run, spec=spec, config=config, casts=precision.shards_cast, step=step)
    copies = ModuleCopies(module, run.world_group, run.data_group)
    proof = _proved(module, run, plan, tape=tape, step=step)
    engine = _cut(module, run, plan, config=config, precision=precision, tape=tape)
    presence = None if engine.stages is None else engine.stages.presence
    holders = None if presence is None else Holders(module, presence)
    copies.cut(beside, engine.stages, holders)
    return AppliedModule(
        module=module,
        plan=plan,
        engine=engine,
        share_buffers=BufferBroadcast(module, run.data_group) if spec.data > 1 else _nothing,
        copies=copies,
        doors=ModuleDoors(module, hook_values(presence, holders)),
        layouts=every_name(module, plan.layouts),
        structure=structure,
        proof=proof,
        presence=presence,
        pipeline_report=None if step is None else _pipeline_report(plan, step.microbatches, module),
    )


def _cut(
    module: LightningModule,
    run: RunOnMesh,
    plan: Plan,
    *,
    config: StrategyConfig,
    precision: Mesh3DPrecision,
    tape: InitTape | None,
) -> MeshEngine:
    with told_if_slow("cutting the module and making its initial values", rank_zero_info):
        return apply_plan(
            module,
            plan,
            run.mesh,
            world=run.world_group,
            device=run.device,
            tape=tape,
            policy=precision.fsdp_policy(),
            streams=run.streams,
            exact_random=config.tensor_random == "exact",
            # In manual optimization the step itself may clip or step between two backward passes.
            partial_gradients=module.automatic_optimization,
        )


def watch_module(applied: AppliedModule, run: RunOnMesh, config: StrategyConfig, *, normalise: bool) -> None:
    """Has calls of a module do what its plan adds to them, until `unwatch_calls`.

    Args:
        applied: The module after its plan was applied.
        run: The mesh of this process.
        config: The strategy's options.
        normalise: Whether batch normalisation takes the batches of all data ranks together.
    """
    watch_calls(
        applied.module,
        applied.plan,
        applied.engine,
        run.streams,
        replay=ReplayOptions(compile=config.compile) if config.replay else None,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
    )
    if normalise and run.data_group.size() > 1:
        normalise_over_ranks(applied.module, run.data_group)


def _proved(
    module: LightningModule, run: RunOnMesh, plan: Plan, *, tape: InitTape | None, step: FirstStep | None
) -> Proof | Skipped | None:
    if plan.tensor is None or step is None:
        return None
    with told_if_slow("proving the plan of the tensor axis on a small part of the model", rank_zero_info):
        return agreed_proof(module, plan.tensor, step, tape, run.world_group)


def _check(
    module: LightningModule, device: torch.device, *, spec: MeshSpec, config: StrategyConfig, tape: InitTape | None
) -> None:
    """Refuses what cannot be made a part, and tells what will be different."""
    check_untouched(module)
    check_recorded(module, tape)
    if config.compile:
        check_compiler(device)
    if spec.tensor > 1:
        _tell_compiled(module)


def _planned(
    module: LightningModule,
    run: RunOnMesh,
    *,
    spec: MeshSpec,
    config: StrategyConfig,
    casts: bool,
    step: FirstStep | None,
) -> Plan:
    if spec.tensor > 1:
        share_gradient_hooks(module, run.world_group)
    # Manual optimization runs backward inside the step, which only an engine of units can follow.
    inside = not module.automatic_optimization and spec.data > 1
    planning = told_if_slow("planning: the first step runs without values", rank_zero_info)
    with planning, on_device(module, run.device):
        plan = make_plan(module, spec, config, casts=casts, backward_inside=inside, step=step)
    return agreed_plan(plan, run.world_group)


def _pipeline_report(plan: Plan, microbatches: int, module: LightningModule) -> PipelineReport | None:
    if plan.pipeline is None:
        return None
    return PipelineReport(
        plan=plan.pipeline,
        parameters=plan.parameters,
        microbatches=microbatches,
        batches=int(module.trainer.accumulate_grad_batches),
        whole_backward=plan.whole_backward,
    )


def check_recorded(module: nn.Module, tape: InitTape | None) -> None:
    """Refuses a module on the meta device whose initialisation nobody has seen.

    Raises:
        ModuleError: Names the first such parameter.
    """
    meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if meta and tape is None:
        raise ModuleError(
            f"{len(meta)} parameters, the first '{meta[0]}', are on the meta device and were not made in "
            "configure_model, so their initial values are unknown.",
            fix="build the model in configure_model, without torch.device('meta')",
        )


def _tell_compiled(module: nn.Module) -> None:
    compiled = compiled_parts(module)
    if compiled:
        rank_zero_info(compiled_notice(compiled))


def compiled_notice(parts: Sequence[str]) -> str:
    """Returns what a user should know who has compiled parts of a module that the tensor axis cuts.

    Args:
        parts: Their names.
    """
    return (
        f"On the tensor axis torch.compile is left out of {few_and_more(parts, 5)}, since it does not see through cut "
        "tensors. Mesh3DStrategy(compile=True) compiles the blocks instead."
    )


def check_untouched(module: nn.Module) -> None:
    """Refuses a module that something has cut or wrapped already.

    Raises:
        ModuleError: Names the sub-module or parameter, and the call to remove.
    """
    for name, child in module.named_modules():
        shown = name or class_name(module)
        if isinstance(child, FSDPModule):
            raise ModuleError(
                f"'{shown}' is sharded already: by fully_shard, another Trainer, or this one before its last module.",
                fix="remove the fully_shard call, or load that Trainer's checkpoint into a new module",
            )
        if isinstance(child, _WRAPPERS):
            raise ModuleError(
                f"'{shown}' is wrapped in {type(child).__name__}.", fix=f"remove the {type(child).__name__}(...) call"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ModuleError(
                f"parameter '{name}' is a DTensor already: {parameter.placements}.",
                fix="remove the parallelize_module or distribute_tensor call from configure_model",
            )


def check_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that hold parameters that are not the module's.

    Raises:
        ModuleError: Says which optimizer, and how many parameters.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        of_optimizer = optimizer_parameters([optimizer])
        stale = sum(id(parameter) not in known for parameter in of_optimizer)
        if stale:
            raise ModuleError(
                f"optimizer {index} ({type(optimizer).__name__}) holds {stale} parameters that are not the module's: "
                "it was made before they were sharded.",
                fix="make optimizers inside configure_optimizers, from self.parameters()",
            )


def optimizer_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of some optimizers, each once, in order."""
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = parameter
    return list(found.values())


def _nothing() -> None:
    """For a single data rank, which has nothing to share."""


def _folded(reports: Sequence[BlockReport]) -> list[str]:
    """One line for all blocks that are replayed, one for each of which there is more to say."""
    lines = [f"{sum(report.replayed for report in reports)} of {len(reports)} blocks are replayed"] if reports else []
    return lines + [str(report) for report in reports if not report.replayed or report.reason]
