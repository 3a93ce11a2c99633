"""The price of the pipeline axis: what an optimizer step sends between stages, what lives for it, and who waits.

A micro-batch crosses each boundary once forward and once backward, whatever the schedule; what differs is how many of
them are on their way at a time (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", section 2.2), and the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.mesh.spec import PIPELINE_AXIS
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.parallel.pipeline.schedule.timeline import Timeline
from lightning_3d.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryTraffic:
    """What a micro-batch sends to a stage, and gets back.

    Attributes:
        stage: Index of the stage that receives.
        sender: Pipeline rank of the stage before.
        receiver: Pipeline rank of the stage.
        forward: Bytes of each tensor that is sent.
        backward: Bytes of each gradient that comes back.
    """

    stage: int
    sender: int
    receiver: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether one rank owns both stages, so that nothing is sent."""
        return self.sender == self.receiver

    def __str__(self) -> str:
        way = f"rank {self.sender} -> rank {self.receiver}"
        sizes = f"{format_bytes(sum(self.forward))} forward, {format_bytes(sum(self.backward))} backward"
        return f"stage {self.stage - 1} -> stage {self.stage}: {way}, {'not sent' if self.is_local else sizes}"


def boundary_traffic(plan: PipelinePlan) -> tuple[BoundaryTraffic, ...]:
    """Returns what crosses each boundary, in model order."""
    return tuple(
        BoundaryTraffic(
            stage=after.index,
            sender=before.rank,
            receiver=after.rank,
            forward=tuple(value.nbytes for value in plan.boundaries[after.index]),
            backward=tuple(value.nbytes for value in plan.boundaries[after.index] if value.requires_grad),
        )
        for before, after in zip(plan.stages, plan.stages[1:], strict=False)
    )


def pipeline_traffic(plan: PipelinePlan, *, rank: int, microbatches: int, batches: int = 1) -> Traffic:
    """Returns what one rank sends in an optimizer step.

    Args:
        plan: The plan.
        rank: The pipeline rank.
        microbatches: Micro-batches of a batch; empty ones that the schedule needs are sent too.
        batches: Accumulated batches.
    """
    crossings = [crossing for crossing in boundary_traffic(plan) if not crossing.is_local]
    sent = [size for crossing in crossings if crossing.sender == rank for size in crossing.forward]
    sent += [size for crossing in crossings if crossing.receiver == rank for size in crossing.backward]
    times = batches * _run(plan, microbatches)
    row = TrafficRow(
        operation="send", axis=PIPELINE_AXIS, group_size=plan.ranks, calls=times * len(sent), payload=times * sum(sent)
    )
    return Traffic(rows=(row,) if sent else ())


def receive_buffers(plan: PipelinePlan, *, rank: int, microbatches: int) -> int:
    """Returns the bytes in which one schedule receives, which it keeps between steps.

    torch has a buffer for every micro-batch, one for what a stage receives and one for the gradients of what it sends.

    Args:
        plan: The plan.
        rank: The pipeline rank.
        microbatches: Micro-batches of a batch.
    """
    crossings = boundary_traffic(plan)
    received = sum(sum(crossing.forward) for crossing in crossings if crossing.receiver == rank)
    returned = sum(sum(crossing.backward) for crossing in crossings if crossing.sender == rank)
    return _run(plan, microbatches) * (received + returned)


def plan_timeline(plan: PipelinePlan, *, microbatches: int, whole_backward: bool = False) -> Timeline:
    """Returns the theoretical timeline of a step, in which a backward is as long as two forwards.

    Args:
        plan: The plan; the times of its stages are their costs.
        microbatches: Micro-batches of a batch; empty ones that the schedule needs take as long as the others.
        whole_backward: Backwards are never split.
    """
    costs = [stage.cost for stage in plan.stages]
    times = [StageTimes(forward=cost, backward_input=cost, backward_weight=cost) for cost in costs]
    return simulate(
        plan.schedule,
        ranks=plan.ranks,
        microbatches=_run(plan, microbatches),
        stages_per_rank=len(plan.stages) // plan.ranks,
        times=times if any(costs) else None,
        whole_backward=whole_backward,
    )


def _run(plan: PipelinePlan, microbatches: int) -> int:
    return runnable_microbatches(plan.schedule, ranks=plan.ranks, microbatches=microbatches)
