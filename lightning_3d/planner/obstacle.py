"""What stands in the way of a mesh, whatever it would cost: numbers that do not divide each other.

The search leaves such meshes out and says why; who asks for one gets the same fact as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_3d.config.batch import local_batch_size
from lightning_3d.errors import BatchError, Lightning3DError, MeshError
from lightning_3d.planner.model import ModelGraph
from lightning_3d.planner.shapes import BatchShape, MeshShape

# Degrees and sizes that an error lists.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a mesh is impossible.

    Attributes:
        fact: With the numbers.
        error: Makes the error for who asked for it.
    """

    fact: str
    error: Callable[[], Lightning3DError]


def obstacle(model: ModelGraph, mesh: MeshShape, batch: BatchShape) -> Obstacle | None:
    """Returns what makes a mesh impossible, None if nothing does.

    Args:
        model: The model.
        mesh: The mesh.
        batch: The batch.
    """
    return (
        tensor_obstacle(model, mesh.tensor_parallel_size)
        or (stages_obstacle(model, mesh) if mesh.layers_per_stage is None else None)
        or batch_obstacle(batch, mesh.data_parallel_size)
    )


def tensor_obstacle(model: ModelGraph, tensor: int) -> Obstacle | None:
    """Returns why some tensor ranks cannot cut the blocks: they divide heads, and features of the layers.

    Args:
        model: The model.
        tensor: Degree of the tensor axis.
    """
    if tensor == 1:
        return None
    lengths = [*_lengths(model)]
    found = next((name for count, name in lengths if count % tensor), None)
    if found is None:
        return None
    fact = f"tensor_parallel_size={tensor} does not divide {found}"

    def error() -> MeshError:
        least = min(count for count, _ in lengths)
        valid = [one for one in range(1, least + 1) if all(count % one == 0 for count, _ in lengths)]
        below = max(one for one in valid if one < tensor)
        return MeshError(f"{fact}.", valid=valid[:_LISTED], fix=f"tensor_parallel_size={below}")

    return Obstacle(fact, error)


def stages_obstacle(model: ModelGraph, mesh: MeshShape) -> Obstacle | None:
    """Returns why a pipeline cannot be filled: each stage needs a block.

    Args:
        model: The model.
        mesh: The mesh.
    """
    ranks, blocks = mesh.pipeline_parallel_size, len(model.blocks)
    each = mesh.stages_per_rank if ranks > 1 else 1
    if ranks * each <= blocks:
        return None
    fact = f"{blocks} blocks cannot fill {ranks * each} stages (pipeline {ranks} x {each} stages on a rank)"

    def error() -> MeshError:
        fewer = f"pipeline_parallel_size={max(1, blocks // each)}"
        return MeshError(
            f"{fact}.",
            valid=f"pipeline_parallel_size x stages_per_rank of at most {blocks}",
            fix="stages_per_rank=1" if ranks <= blocks else fewer,
        )

    return Obstacle(fact, error)


def batch_obstacle(batch: BatchShape, data: int) -> Obstacle | None:
    """Returns why a batch cannot be shared out: data ranks get equal shares, of equal micro-batches.

    Args:
        batch: The batch.
        data: Degree of the data axis.
    """
    if batch.global_size % data:
        fact = f"global_size={batch.global_size} does not divide into {data} data ranks"

        def unequal() -> BatchError:
            try:
                local_batch_size(batch.global_size, data)
            except BatchError as error:
                return error
            raise AssertionError("it does not divide")

        return Obstacle(fact, unequal)
    local = batch.global_size // data
    if local % batch.micro_size == 0:
        return None
    fact = (
        f"micro_size={batch.micro_size} does not divide the {local} samples that each of {data} data ranks gets of "
        f"{batch.global_size}"
    )

    def error() -> BatchError:
        valid = [size for size in range(1, local + 1) if local % size == 0]
        below = max(size for size in valid if size < batch.micro_size)
        shown = valid if len(valid) <= _LISTED else [*valid[: _LISTED - 1], "...", local]
        return BatchError(f"{fact}.", valid=shown, fix=f"batch.micro_size={below}")

    return Obstacle(fact, error)


def _lengths(model: ModelGraph) -> Iterator[tuple[int, str]]:
    """What a tensor axis cuts in the blocks, and how it is called. A vocabulary can be padded."""
    for count in dict.fromkeys(model.heads):
        yield count, f"{count} heads"
    known = set()
    for part in dict.fromkeys(model.blocks):
        for one in part.matrices:
            if one.cut_dim is not None:
                known.add(one.rows if one.cut_dim == 0 else one.columns)
    for count in sorted(known):
        yield count, f"{count} features of a layer"
