"""The search: every mesh that a model, a batch and a cluster allow, priced; the best, and why not the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_3d.config.schema import KEPT_KINDS, ONE_STAGE_SCHEDULES, V_SCHEDULES
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.planner.case import Case
from lightning_3d.planner.footprint import footprint
from lightning_3d.planner.model import ModelGraph
from lightning_3d.planner.obstacle import batch_obstacle, stages_obstacle, tensor_obstacle
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.shapes import BatchShape, MeshShape
from lightning_3d.planner.step import step_time
from lightning_3d.units import counted, format_seconds

_ORDERS = ("data,pipeline,tensor", "pipeline,data,tensor")
# Larger shard groups pad more and wait longer: beyond these, replicas of shards are tried too.
_SHARDS = (8, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What the search may vary.

    Attributes:
        global_size: Samples of an optimizer step.
        micro_sizes: Samples of a micro-batch.
        zero_stages: Stages of ZeRO; 0 needs more memory than 1 and sends as much, so it is not tried.
        kinds: Kinds of activation checkpointing, the fastest first.
        schedules: Pipeline schedules. Those with split backwards are right for some modules only: they are asked for.
        stages_per_rank: Stages on a rank of schedules that take several.
        sequence_parallel: Whether the sequence is cut at tensor degrees above 1.
        largest_tensor: Highest tensor degree; None: the devices of a node.
        tensor: The only tensor degree; None: all.
        pipeline: The only pipeline degree; None: all.
    """

    global_size: int
    micro_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    zero_stages: tuple[int, ...] = (1, 2, 3)
    kinds: tuple[str, ...] = KEPT_KINDS
    schedules: tuple[str, ...] = ("1f1b", "interleaved1f1b")
    stages_per_rank: tuple[int, ...] = (2, 4, 8)
    sequence_parallel: bool = True
    largest_tensor: int | None = None
    tensor: int | None = None
    pipeline: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A case with its two figures.

    Attributes:
        case: The case.
        needed: Bytes that a device must have.
        seconds: Of a step; infinite if it does not fit.
    """

    case: Case
    needed: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """A mesh that was not taken.

    Attributes:
        mesh: The mesh, or what a group of meshes has in common.
        reason: Why, with the number that decides.
    """

    mesh: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        best: The fastest, each from another pair of pipeline and tensor degree.
        rejected: The nearest others.
        priced: Meshes that were priced.
        times: Seconds of a step of those that fit, the least first.
        seconds: How long it took.
        closest: Where nothing fits: what needs least.
    """

    best: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]
    priced: int
    times: tuple[float, ...]
    seconds: float
    closest: Prediction | None = None


def search(pricer: Pricer, devices: int, space: Space, *, top: int = 3) -> Found:
    """Prices every mesh and returns the best.

    Args:
        pricer: The model on its cluster.
        devices: Devices to use, all of them.
        space: What may vary.
        top: How many meshes to return.
    """
    began = time.perf_counter()
    fitting: list[Candidate] = []
    misfits: list[Candidate] = []
    priced = 0
    # Larger micro-batches keep as much or more: the least that does not fit, by all else that memory depends on.
    too_large: dict[tuple[int | str, ...], int] = {}
    for cases in _choices(pricer, devices, space):
        key, micro = _memory_key(cases[0]), cases[0].batch.micro_size
        if too_large.get(key, micro + 1) <= micro:
            continue
        for case in cases:
            priced += 1
            candidate = price(pricer, case)
            if candidate.seconds < float("inf"):
                fitting.append(candidate)
                # What computes less again is faster.
                break
            misfits.append(candidate)
        else:
            too_large[key] = micro
    fitting.sort(key=lambda one: one.seconds)
    families: dict[tuple[int, int], Candidate] = {}
    for one in fitting:
        families.setdefault(_family(one.case), one)
    ranked = list(families.values())
    best = tuple(pricer.predict(one.case) for one in ranked[:top])
    least = min(misfits, key=lambda one: one.needed, default=None)
    return Found(
        best=best,
        rejected=tuple(_rejections(pricer, devices, space, ranked[top:], misfits, best[0] if best else None)),
        priced=priced,
        times=tuple(one.seconds for one in fitting),
        seconds=time.perf_counter() - began,
        closest=pricer.predict(least.case) if least is not None and not best else None,
    )


def price(pricer: Pricer, case: Case) -> Candidate:
    """Returns the two figures of a case; the time only if it fits."""
    memory, _, _ = footprint(pricer.shared, case)
    needed = pricer.needed(memory)
    if needed > pricer.shared.cluster.memory:
        return Candidate(case, needed, float("inf"))
    return Candidate(case, needed, step_time(pricer.shared, case)[0].total * pricer.shared.cluster.time_scale)


def tensor_degrees(model: ModelGraph, largest: int) -> tuple[int, ...]:
    """Returns the tensor degrees that divide the largest one, and what they cut."""
    degrees = (degree for degree in range(1, largest + 1) if largest % degree == 0)
    return tuple(degree for degree in degrees if tensor_obstacle(model, degree) is None)


def _choices(pricer: Pricer, devices: int, space: Space) -> Iterator[list[Case]]:
    """Yields lists of cases; those of a list differ in what they compute again only."""
    model = pricer.shared.model
    largest = space.largest_tensor or pricer.shared.cluster.devices_per_node
    for tensor in tensor_degrees(model, largest):
        if devices % tensor or space.tensor not in (None, tensor):
            continue
        sequence = space.sequence_parallel and tensor > 1 and model.last.rows % tensor == 0
        for pipeline in _divisors(devices // tensor):
            data = devices // tensor // pipeline
            if pipeline > len(model.blocks) or space.pipeline not in (None, pipeline):
                continue
            batches = [BatchShape(global_size=space.global_size, micro_size=micro) for micro in space.micro_sizes]
            batches = [batch for batch in batches if batch_obstacle(batch, data) is None]
            for mesh in _meshes(pricer, space, data, pipeline, tensor, sequence):
                for batch in batches:
                    yield from _schedules(space, model, mesh, batch)


def _meshes(pricer: Pricer, space: Space, data: int, pipeline: int, tensor: int, sequence: bool) -> Iterator[MeshShape]:
    """Yields what one choice of degrees can still vary in: stage, replicas, order of the ranks."""
    stages = space.zero_stages if data > 1 else space.zero_stages[:1]
    # Orders differ where a node holds more than one tensor group, and both other axes have ranks.
    inside = pricer.shared.cluster.devices_per_node > tensor and pipeline > 1 and data > 1
    for stage in stages:
        # A reduction for each micro-batch of a pipeline: stage 3 saves more for it.
        if stage == 2 and pipeline > 1 and 3 in stages:
            continue
        for shards in (data, *(size for size in _SHARDS if stage == 3 and size < data and data % size == 0)):
            for order in _ORDERS if inside else _ORDERS[:1]:
                yield MeshShape(
                    data_parallel_size=data,
                    data_replicate_size=data // shards,
                    pipeline_parallel_size=pipeline,
                    tensor_parallel_size=tensor,
                    zero_stage=stage,
                    sequence_parallel=sequence,
                    rank_order=order,
                )


def _schedules(space: Space, model: ModelGraph, mesh: MeshShape, batch: BatchShape) -> Iterator[list[Case]]:
    pipeline = mesh.pipeline_parallel_size
    count = batch.global_size // mesh.data_parallel_size // batch.micro_size
    if pipeline == 1:
        yield [Case(mesh=mesh, batch=batch, schedule="1f1b", kind=kind, microbatches=count) for kind in space.kinds]
        return
    if count < pipeline:
        return
    for schedule in space.schedules:
        stages = (1,) if schedule in ONE_STAGE_SCHEDULES else space.stages_per_rank
        stages = (2,) if schedule in V_SCHEDULES else stages
        for each in stages:
            wanted = replace(mesh, stages_per_rank=each) if each > 1 else mesh
            if stages_obstacle(model, wanted) or (each > 1 and count % pipeline):
                continue
            runs = runnable_microbatches(schedule, ranks=pipeline, microbatches=count)
            yield [
                Case(mesh=wanted, batch=batch, schedule=schedule, kind=kind, microbatches=runs) for kind in space.kinds
            ]


def _rejections(
    pricer: Pricer,
    devices: int,
    space: Space,
    slower: list[Candidate],
    misfits: list[Candidate],
    best: Prediction | None,
) -> Iterator[Rejected]:
    model, cluster = pricer.shared.model, pricer.shared.cluster
    for one in slower[:3]:
        assert best is not None, "something is slower than it"
        yield Rejected(_name(one.case), why_slower(pricer.predict(one.case), best))
    near: dict[tuple[int, int, int], Candidate] = {}
    for one in sorted(misfits, key=lambda one: one.needed):
        near.setdefault((*_family(one.case), one.case.mesh.zero_stage), one)
    taken = {(one.mesh.pipeline_parallel_size, one.mesh.tensor_parallel_size) for one in (best,) if one is not None}
    for (pipeline, tensor, _), one in list(near.items())[:4]:
        if (pipeline, tensor) not in taken:
            over = one.needed - cluster.memory
            more = f"{over / 1e9:.1f} GB" if over >= 1e9 else f"{over / 1e6:.0f} MB"
            text = f"does not fit: {one.needed / 1e9:.1f} GB needed, {more} more than a device has"
            yield Rejected(f"{_name(one.case)}, checkpointing {one.case.kind}", text)
    largest = space.largest_tensor or cluster.devices_per_node
    for tensor in (degree for degree in range(2, largest + 1) if largest % degree == 0 and devices % degree == 0):
        found = tensor_obstacle(model, tensor)
        if found is not None:
            yield Rejected(f"tensor {tensor}", found.fact)
    per_node, outer = cluster.devices_per_node, cluster.levels[-1]
    if largest <= per_node < devices and len(cluster.levels) > 1:
        yield Rejected(
            f"tensor above {per_node}",
            f"crosses nodes of {counted(per_node, 'device')}: each block would sum over the {outer.name}, "
            f"{outer.bandwidth / 1e9:.2g} GB/s instead of {cluster.levels[0].bandwidth / 1e9:.3g}",
        )


def why_slower(one: Prediction, best: Prediction) -> str:
    """Returns by how much a mesh is slower than another, and the part that makes most of the difference."""
    more = {name: seconds - best.time.by_name()[name] for name, seconds in one.time.by_name().items()}
    name = max(more, key=lambda part: more[part])
    slower = one.step_seconds / best.step_seconds - 1
    return f"{slower:.0%} slower: {name} takes {format_seconds(more[name])} more of {format_seconds(one.step_seconds)}"


def _name(case: Case) -> str:
    micro = f"micro-batch {case.batch.micro_size}"
    return f"{case.mesh}, {micro}"


def _family(case: Case) -> tuple[int, int]:
    return case.mesh.pipeline_parallel_size, case.mesh.tensor_parallel_size


def _memory_key(case: Case) -> tuple[int | str, ...]:
    """All that the bytes of a model depend on, but for the micro-batch and what is computed again."""
    mesh = case.mesh
    stages = mesh.zero_stage, mesh.stages_per_rank
    return mesh.data_parallel_size, mesh.shards, *_family(case), *stages, case.schedule


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, 512) + 1) if number % divisor == 0]
