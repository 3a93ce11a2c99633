"""Bytes on the pipeline rank that holds most, at its worst moment."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.planner.bubble import in_flight
from lightning_3d.planner.case import Case
from lightning_3d.planner.layout import Kind
from lightning_3d.planner.prediction import MemoryParts
from lightning_3d.planner.recipes import ModelStates
from lightning_3d.planner.shapes import MeshShape
from lightning_3d.planner.shared import Shared


def footprint(shared: Shared, case: Case) -> tuple[MemoryParts, int, float]:
    """Returns the bytes of the pipeline rank that holds most, its number, and what it has in flight.

    Args:
        shared: The model on its cluster.
        case: What to price.

    Raises:
        MeshError: The model cannot be cut so.
    """
    found = []
    for kind in shared.layout(case).kinds:
        # Of equal ranks the first or the last has most in flight, by schedule.
        count, rank = max([(_waiting(case, rank), rank) for rank in {kind.first, kind.last}])
        flights = count / case.stages_per_rank
        memory = _rank_memory(shared, case, kind, flights)
        found.append((memory.total, rank, memory, flights))
    _, rank, memory, flights = max(found, key=lambda one: one[0])
    return memory, rank, flights


def rank_footprint(shared: Shared, case: Case, rank: int) -> MemoryParts:
    """Returns the bytes of one pipeline rank at its worst moment.

    Args:
        shared: The model on its cluster.
        case: What to price.
        rank: The pipeline rank.

    Raises:
        MeshError: The model cannot be cut so.
    """
    kind = shared.layout(case).kind_of(rank)
    return _rank_memory(shared, case, kind, _waiting(case, rank) / case.stages_per_rank)


def _waiting(case: Case, rank: int) -> int:
    return in_flight(
        case.schedule,
        ranks=case.mesh.pipeline_parallel_size,
        rank=rank,
        microbatches=case.microbatches,
        stages_per_rank=case.stages_per_rank,
    )


def _rank_memory(shared: Shared, case: Case, kind: Kind, flights: float) -> MemoryParts:
    mesh, tensor = case.mesh, case.mesh.tensor_parallel_size
    of_weights = ("weights", kind, tensor, mesh.shards, mesh.zero_stage)
    states, padding, gathered, reducing = shared.once(of_weights, lambda: _weights(shared, mesh, kind))
    samples, width = case.batch.micro_size, shared.recipe.computed / 2
    of_sample = ("sample", kind, tensor, mesh.sequence_parallel, case.kind)
    kept, working = shared.once(of_sample, lambda: _sample(shared, case, kind))
    kept, again = kept * flights, working * samples * width
    logits = 0.0
    if kind.has_last:
        last = shared.model.last
        kept += last.keeps(case.kind).on_rank(tensor, mesh.sequence_parallel)
        logits = last.logits * shared.software.logit_bytes * samples * width / tensor
    buffers = 0.0
    if shared.software.buffers_per_microbatch and mesh.pipeline_parallel_size > 1:
        ends = kind.has_first + kind.has_last
        received = 2 * case.stages_per_rank - ends
        buffers = case.microbatches * received * shared.state(case) * samples
    # The worst moment is either the loss, or the backward of the block after it, whose gradients are reduced.
    at_loss = logits > again + reducing
    return MemoryParts(
        parameters=states.parameters,
        gathered_parameters=gathered * shared.recipe.computed,
        gradients=states.gradients + (0.0 if at_loss else reducing),
        optimizer=states.optimizer,
        activations=kept * samples * width,
        recomputed=0.0 if at_loss else again,
        logits=logits if at_loss else 0.0,
        communication_buffers=buffers,
        padding=padding,
    )


def _weights(shared: Shared, mesh: MeshShape, kind: Kind) -> tuple[ModelStates, float, float, float]:
    """What does not depend on the batch: states, bytes of padding, and the two figures of the units at work."""
    plain, padded = shared.parameters(mesh, kind)
    states, padding = (
        shared.recipe.states(elements, zero_stage=mesh.zero_stage, shards=mesh.shards)
        for elements in (plain, padded - plain)
    )
    return states, padding.total, *_units_at_work(shared, mesh, kind)


def _sample(shared: Shared, case: Case, kind: Kind) -> tuple[float, float]:
    """Bytes of a sample in 16 bit, over all blocks: kept for the backward, and held while a block is computed again."""
    prefix = shared.kept_prefix(case.mesh.tensor_parallel_size, case.mesh.sequence_parallel, case.kind)
    return kind.sum(prefix), _working(shared, case, kind.spans)


def _units_at_work(shared: Shared, mesh: MeshShape, kind: Kind) -> tuple[float, float]:
    """Elements of whole weights that are gathered, and bytes of whole gradients of the unit that reduces."""
    if not shared.software.shards_by_unit or mesh.shards == 1 or mesh.zero_stage == 0:
        return 0.0, 0.0
    tensor = mesh.tensor_parallel_size
    block, travelling = shared.largest_block(tensor), shared.largest_block(tensor, mesh.shards)
    reducing = travelling * shared.reduced
    if mesh.zero_stage < 3:
        return 0.0, reducing
    # The root is whole from the first forward to the last backward, and the head's gradient waits for the embedding's;
    # of the blocks, one is at work and the next one gathers.
    if kind.has_last:
        reducing += shared.model.last.parameters_on_rank(tensor) * shared.recipe.computed
    return shared.ends(tensor, 1, kind) + block + travelling, reducing


def _working(shared: Shared, case: Case, spans: Sequence[tuple[int, int]]) -> float:
    """Bytes of a sample that one block holds only while it is computed again."""
    tensor, sequence = case.mesh.tensor_parallel_size, case.mesh.sequence_parallel
    unfused = not shared.software.fused_attention
    largest = 0.0
    for part in {shared.blocks[begin] for begin, end in spans if begin < end}:
        whole = part.keeps("none").on_rank(tensor, sequence)
        scores = part.scores / tensor if unfused else 0.0
        if case.kind == "full":
            largest = max(largest, whole + scores)
        elif case.kind == "selective" and shared.software.selective == "products":
            largest = max(largest, whole - part.keeps("selective").on_rank(tensor, sequence) + scores)
        elif case.kind == "selective":
            largest = max(largest, scores)
    return largest
