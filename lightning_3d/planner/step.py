"""Seconds of a training step, on the pipeline rank that computes longest."""

from __future__ import annotations

from typing import NamedTuple

from lightning_3d.parallel.pipeline.schedule.actions import SPLIT_SCHEDULES
from lightning_3d.planner.bubble import idle_time, interleaved_sends
from lightning_3d.planner.case import Case
from lightning_3d.planner.layout import Kind
from lightning_3d.planner.prediction import TimeParts
from lightning_3d.planner.shared import Shared
from lightning_3d.planner.speed import Group


class _RankTimes(NamedTuple):
    """Seconds of one micro-batch on a pipeline rank."""

    forward: float
    backward: float
    again: float
    tensor: float
    data: float
    hidden: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def step_time(shared: Shared, case: Case) -> tuple[TimeParts, float]:
    """Returns the seconds of a step by part, and those of the data axis that computation hides.

    Args:
        shared: The model on its cluster.
        case: What to price.

    Raises:
        MeshError: The model cannot be cut so.
    """
    mesh, count = case.mesh, case.microbatches
    kinds = shared.layout(case).kinds
    times = [_rank_times(shared, case, kind) for kind in kinds]
    worst = max(times, key=lambda one: one.total)
    sends, once = _sends(shared, case, worst)
    busy = worst.total + sends
    bubble = _bubble(
        case,
        sum(kind.count * (one.total + sends) for kind, one in zip(kinds, times, strict=True)) - busy,
        worst,
        sends,
    )
    largest = max(shared.parameters(mesh, kind)[1] for kind in kinds)
    data, hidden = _data_step(shared, case, largest, worst)
    shards = mesh.shards if mesh.zero_stage else 1
    optimizer = shared.constants.optimizer_bytes * largest / shards / shared.cluster.memory_bandwidth
    parts = TimeParts(
        compute=count * (worst.total - worst.again - worst.tensor - worst.data),
        recompute=count * worst.again,
        bubble=bubble,
        tensor=count * worst.tensor,
        pipeline=count * sends + once,
        data=data + count * worst.data,
        optimizer=optimizer,
        fixed=shared.constants.step_seconds,
    )
    return parts, hidden + count * worst.hidden


def _rank_times(shared: Shared, case: Case, kind: Kind) -> _RankTimes:
    mesh = case.mesh
    forward, backward, again, tensor = (kind.sum(prefix) for prefix in shared.time_prefixes(case))
    exposed, hidden, late = 0.0, 0.0, 0.0
    if mesh.zero_stage >= 2 and mesh.shards > 1 and kind.blocks:
        weights = kind.sum(shared.parameter_prefix(mesh.tensor_parallel_size, mesh.shards))
        exposed, late, hidden = _data_microbatch(shared, case, weights, kind.blocks, forward, backward)
    for part, there in ((shared.model.first, kind.has_first), (shared.model.last, kind.has_last)):
        if there:
            end = shared.part_times(part, case)
            forward, backward, tensor = forward + end.forward, backward + end.backward, tensor + end.tensor
    return _RankTimes(forward + exposed, backward + late, again, tensor, exposed + late, hidden)


def _data_microbatch(
    shared: Shared, case: Case, weights: float, blocks: int, forward: float, backward: float
) -> tuple[float, float, float]:
    """What the data axis adds to a micro-batch's forward and backward at stages 2 and 3, and what is hidden."""
    mesh = case.mesh
    group = Group(size=mesh.shards, stride=mesh.stride("data"))
    unit = weights / blocks
    gather = blocks * shared.speed.ring(group, unit * shared.gathered) if mesh.zero_stage == 3 else 0.0
    # At stage 2 the last reduction of a step is counted with the step.
    scatter = blocks * shared.speed.ring(group, unit * shared.reduced)
    if mesh.zero_stage == 2:
        scatter *= (case.microbatches - 1) / case.microbatches
    early = shared.speed.hidden(gather, forward) if gather else 0.0
    late = shared.speed.hidden(gather + scatter, backward)
    return early, late, 2 * gather + scatter - early - late


def _data_step(shared: Shared, case: Case, padded: float, worst: _RankTimes) -> tuple[float, float]:
    """What the data axis adds to a step, and what is hidden of what it does once."""
    mesh = case.mesh
    if mesh.data_parallel_size == 1:
        return 0.0, 0.0
    stride, stage = mesh.stride("data"), mesh.zero_stage
    units = max(kind.blocks for kind in shared.layout(case).kinds) + 1 if shared.software.shards_by_unit else 1
    if stage == 0:
        group = Group(size=mesh.data_parallel_size, stride=stride)
        reduce = shared.speed.ring(group, padded * shared.reduced, 2)
        exposed = shared.speed.hidden(reduce, worst.backward)
        return exposed, reduce - exposed
    group = Group(size=mesh.shards, stride=stride)
    root = shared.model.first.parameters_on_rank(mesh.tensor_parallel_size)
    once = root if stage == 3 else padded
    gather = units * shared.speed.ring(group, once / units * shared.gathered)
    scatter = units * shared.speed.ring(group, once / units * shared.reduced)
    replicas = Group(size=mesh.data_replicate_size, stride=stride * mesh.shards)
    scatter += shared.speed.ring(replicas, padded / mesh.shards * shared.reduced, 2)
    early, late = shared.speed.hidden(gather, worst.forward), shared.speed.hidden(scatter, worst.backward)
    return early + late, gather + scatter - early - late


def _bubble(case: Case, others: float, worst: _RankTimes, sends: float) -> float:
    """Seconds for which the slowest rank waits: (p - 1) micro-batches of the others, for equal ones."""
    ranks, stages = case.mesh.pipeline_parallel_size, case.stages_per_rank
    if ranks == 1:
        return 0.0
    whole = (ranks - 1) * (worst.total + sends)
    # Of a backward, the half for the weights is the products' second half.
    weight = max(0.0, (worst.backward - worst.again - worst.tensor / 2) / 2) if case.schedule in SPLIT_SCHEDULES else 0
    idle = idle_time(
        case.schedule,
        ranks=ranks,
        microbatches=case.microbatches,
        forward=worst.forward + sends / 2,
        backward_input=worst.backward + sends / 2 - weight,
        backward_weight=weight,
        stages_per_rank=stages,
    )
    return idle / stages * others / whole


def _sends(shared: Shared, case: Case, worst: _RankTimes) -> tuple[float, float]:
    """Seconds that sending states forward and gradients backward adds: to each micro-batch, and once to a step."""
    mesh = case.mesh
    if mesh.pipeline_parallel_size == 1:
        return 0.0, 0.0
    state = shared.state(case) * case.batch.micro_size
    if shared.software.scatters_boundaries and not mesh.sequence_parallel:
        state /= mesh.tensor_parallel_size
    pipeline = Group(size=mesh.pipeline_parallel_size, stride=mesh.stride("pipeline"))
    stages = case.stages_per_rank
    link = shared.speed.send(state, pipeline, in_a_circle=stages > 1)
    if stages == 1 or not shared.software.overlaps_sends:
        return 2 * stages * link, 0.0
    return 0.0, interleaved_sends(
        link, ranks=mesh.pipeline_parallel_size, stages=stages, microbatches=case.microbatches, seconds=worst.total
    )
