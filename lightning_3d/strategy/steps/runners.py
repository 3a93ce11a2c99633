"""What runs a module's steps on its mesh, put together from what the module has become."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.strategy.life import AppliedModule
from lightning_3d.strategy.logging.metrics import MetricDoors
from lightning_3d.strategy.logging.relay import Relay
from lightning_3d.strategy.run import RunOnMesh
from lightning_3d.strategy.steps.attributes import StepAttributes
from lightning_3d.strategy.steps.pipeline import PipelineRunner
from lightning_3d.strategy.steps.runner import BatchRunner, RunnerParts
from lightning_3d.strategy.steps.whole import StepRunner


def relay_of(applied: AppliedModule, run: RunOnMesh) -> Relay | None:
    """Returns what sends from the last stage to the other ranks of this pipeline; None without a pipeline.

    Args:
        applied: The module after its plan was applied.
        run: The mesh of this process.
    """
    plan = applied.plan.pipeline
    return None if plan is None else Relay(applied.module, run.pipeline_group, plan.last_rank, run.device)


def make_runner(
    applied: AppliedModule,
    run: RunOnMesh,
    precision: Mesh3DPrecision,
    *,
    config: StrategyConfig,
    trained: Callable[[], list[Tensor]],
    relay: Relay | None,
    metrics: MetricDoors,
) -> BatchRunner:
    """Returns what runs the steps of a module.

    Args:
        applied: The module after its plan was applied.
        run: The mesh of this process.
        precision: Contexts and the loss scale.
        config: The strategy's options.
        trained: Returns the parameters of all optimizers.
        relay: From `relay_of`.
        metrics: The doors of the module's metrics.
    """
    parts = RunnerParts(
        module=applied.module,
        engine=applied.engine,
        precision=precision,
        config=config,
        streams=run.streams,
        data_group=run.data_group,
        metrics=metrics,
        trained=trained,
        share_buffers=applied.share_buffers,
    )
    plan, stages = applied.plan.pipeline, applied.engine.stages
    if plan is None or stages is None or relay is None:
        return StepRunner(parts)
    return PipelineRunner(
        parts,
        pipeline=stages.engine,
        relay=relay,
        attributes=StepAttributes(applied.module, plan, run.pipeline_group.rank(), relay),
        collectives=run.collectives,
        finishes_some=relay.sends and len(plan.stages_of(plan.last_rank)) > 1,
    )
