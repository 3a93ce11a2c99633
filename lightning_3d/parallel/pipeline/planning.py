"""From a module and its step to the plan of its pipeline axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ModuleError, PlanError
from lightning_3d.graph.blocks import Stack
from lightning_3d.graph.copies import unused_copies
from lightning_3d.graph.fake_run import fake_run
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.pipeline.balance import balanced
from lightning_3d.parallel.pipeline.owners import find_owners, parameters_below, refuse_replicated_statistics
from lightning_3d.parallel.pipeline.placement import ranks_of_stages
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.record.observer import PipelineObserver
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.stacks import pipeline_stacks

Step = Callable[[], Any]


def find_pipeline_plan(
    module: LightningModule,
    step: Step,
    *,
    parameters: ParameterTable,
    stacks: Sequence[Stack],
    ranks: int,
    config: StrategyConfig,
) -> PipelinePlan:
    """Returns the plan of an untouched module, from one fake run of its step.

    Args:
        module: The whole module, real or on the meta device.
        step: Calls the user's step with a real batch.
        parameters: The module's parameters.
        stacks: Its lists of equal blocks.
        ranks: Degree of the pipeline axis.
        config: The strategy's options.

    Raises:
        PlanError: There is nothing to cut, or fewer blocks than stages.
        ModuleError: The module or its step does what stages cannot share out.
    """
    observer = pipeline_observer(module, parameters, stacks, config)
    fake_run(module, observer.heard(step), stacks=stacks, observers=[observer])
    record = observer.record
    return plan_from_record(
        record,
        module=module,
        parameters=parameters,
        tracked=observer.tracked,
        ranks=ranks,
        config=config,
        twins=unused_copies(module, parameters, record.parameters.keys()),
    )


def pipeline_observer(
    module: LightningModule, parameters: ParameterTable, stacks: Sequence[Stack], config: StrategyConfig
) -> PipelineObserver:
    """Returns what watches a fake run for the pipeline axis, beside others or alone.

    Args:
        module: The whole module.
        parameters: The module's parameters.
        stacks: Its lists of equal blocks.
        config: The strategy's options.

    Raises:
        PlanError: There is nothing to cut.
        ModuleError: The module runs backward itself.
    """
    refuse_own_backward(module)
    return PipelineObserver(module, parameters, pipeline_stacks(module, stacks, config.pipeline_stack))


def refuse_own_backward(module: LightningModule) -> None:
    """Refuses modules whose backward passes a schedule could not run.

    Args:
        module: The whole module.

    Raises:
        ModuleError: The module optimizes manually or overrides ``backward``.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ModuleError(
            f"{name} sets automatic_optimization=False, and with pipeline_parallel_size above 1 the schedule runs "
            "backward.",
            fix="automatic optimization, or pipeline_parallel_size=1",
        )
    if type(module).backward is not LightningModule.backward or "backward" in vars(module):
        raise ModuleError(
            f"{name} overrides backward, and with pipeline_parallel_size above 1 the schedule runs it.",
            fix="scale the loss in training_step, or use on_after_backward, or pipeline_parallel_size=1",
        )


def plan_from_record(
    record: StepRecord,
    *,
    module: nn.Module,
    parameters: ParameterTable,
    tracked: Sequence[str],
    ranks: int,
    config: StrategyConfig,
    twins: Mapping[str, str] | None = None,
) -> PipelinePlan:
    """Returns the plan for a recorded step.

    Args:
        record: What the step does.
        module: The whole module.
        parameters: The module's parameters.
        tracked: The watched modules beside the blocks.
        ranks: Degree of the pipeline axis.
        config: The strategy's options.
        twins: The original of each parameter of a copy that the step does not use.

    Raises:
        PlanError: There are fewer blocks than stages, or `layers_per_stage` does not fit them.
        ModuleError: Several stages call a module with running statistics.
    """
    below = parameters_below(module, (*record.blocks, *tracked), parameters)
    sizes = {row.name: float(row.numel) for row in parameters.rows}
    costs = record.flops
    if not costs or not all(costs[1:]):
        # Of operations that nobody counts, as those of recurrent layers.
        costs = (0.0, *(sum(sizes[name] for name in below[block]) for block in record.blocks))
    layers = _layers(costs, ranks, config)
    ends = tuple(accumulate(layers))
    firsts = (0, *ends[:-1])
    holders, modules = find_owners(record, firsts, parameters=parameters, below=below, twins=twins or {})
    refuse_replicated_statistics(module, modules)
    places = ranks_of_stages(config.pipeline_schedule, ranks, config.stages_of_a_rank())
    whole = sum(costs) or 1.0
    stages = tuple(
        Stage(
            index=index,
            rank=places[index],
            first=first,
            end=end,
            cost=sum(costs[0 if index == 0 else first + 1 : end + 1]) / whole,
        )
        for index, (first, end) in enumerate(zip(firsts, ends, strict=True))
    )
    return PipelinePlan(
        schedule=config.pipeline_schedule,
        ranks=ranks,
        blocks=record.blocks,
        stages=stages,
        holders=holders,
        modules=modules,
        boundaries=((), *(record.boundaries[first] for first in firsts[1:])),
    )


def _layers(costs: Sequence[float], ranks: int, config: StrategyConfig) -> tuple[int, ...]:
    """How many blocks each stage gets.

    Args:
        costs: Of each position, one more than there are blocks.
        ranks: Degree of the pipeline axis.
        config: The strategy's options.
    """
    per_rank, count = config.stages_of_a_rank(), len(costs) - 1
    stages = ranks * per_rank
    if count < stages:
        shared = "" if per_rank == 1 else f" x {per_rank} stages a rank ({config.pipeline_schedule})"
        most = count // per_rank
        one_each = "" if per_rank == 1 else "pipeline_schedule=1f1b, "
        raise PlanError(
            f"pipeline_parallel_size={ranks}{shared} needs {stages} blocks, the model has {count}.",
            valid=f"pipeline_parallel_size of at most {most} with this schedule" if most else None,
            fix=f"a smaller pipeline_parallel_size, {one_each}or pipeline_stack=<a list of more layers>",
        )
    if config.layers_per_stage is None:
        return balanced((costs[0] + costs[1], *costs[2:]), stages)
    if len(config.layers_per_stage) != stages or sum(config.layers_per_stage) != count:
        wanted = config.layers_per_stage
        raise PlanError(
            f"layers_per_stage={list(wanted)} has {len(wanted)} entries and {sum(wanted)} blocks in all.",
            valid=f"{stages} entries, one for each stage, that sum to {count}",
            fix="layers_per_stage=null lets the counted cost decide",
        )
    return tuple(config.layers_per_stage)
