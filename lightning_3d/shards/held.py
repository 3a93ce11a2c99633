"""Which part of a tensor a rank holds, when a mesh of several axes cuts it: run by run of the original order.

On the tensor axis a packed weight (q, k and v in one matrix) is a DTensor that says ``Shard(dim)``, while a rank's part
is its share of each segment. What DTensor makes of the parts is therefore in another order than the model's own.
One whose length the ranks do not divide is longer than the model's own: its last part is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from typing_extensions import Self

from lightning_3d.errors import PartError
from lightning_3d.shards.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A block of the original tensor that lies in one piece in a rank's part.

    Attributes:
        offsets: Where the block begins in the original tensor.
        sizes: Its shape.
        start: Where it begins in the rank's part, along the packed dim.
    """

    offsets: torch.Size
    sizes: torch.Size
    start: int

    @property
    def block(self) -> tuple[slice, ...]:
        """The block as an index of the original tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A further cut of a rank's part: one of ``count`` chunks of ``dim``, as ``torch.chunk`` cuts."""

    dim: int
    index: int
    count: int


def held_runs(shape: Sequence[int], layout: Layout, rank: int, size: int, chunks: Sequence[Chunk]) -> tuple[Run, ...]:
    """Returns which blocks of a packed tensor a rank holds, in the order of its part.

    Args:
        shape: The original, global shape.
        layout: How the tensor axis cuts it; its padding is in no block.
        rank: The rank's position on the tensor axis.
        size: The tensor axis' degree.
        chunks: How other axes cut the tensor rank's part, outermost first.
    """
    lengths = list(shape)
    lengths[layout.dim] = layout.padded_length(size)
    starts = [0] * len(lengths)
    for chunk in chunks:
        longest = -(-lengths[chunk.dim] // chunk.count)
        skipped = min(chunk.index * longest, lengths[chunk.dim])
        starts[chunk.dim] += skipped
        lengths[chunk.dim] = min(longest, lengths[chunk.dim] - skipped)
    if 0 in lengths:
        return ()
    runs = []
    begin, position = starts[layout.dim], 0
    for origin, length in layout.runs(rank, size):
        first, last = max(position, begin), min(position + length, begin + lengths[layout.dim])
        if first < last:
            offsets, sizes = [*starts], [*lengths]
            offsets[layout.dim], sizes[layout.dim] = origin + first - position, last - first
            runs.append(Run(offsets=torch.Size(offsets), sizes=torch.Size(sizes), start=first - begin))
        position += length
    return tuple(runs)


def runs_on_mesh(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], layout: Layout | None, axis: int | None
) -> tuple[Run, ...]:
    """Returns which blocks of a tensor this rank holds.

    Args:
        shape: The original, global shape, of one dim at least.
        mesh: All axes that the tensor lies on.
        placements: What torch calls its cuts.
        layout: How the tensor axis cuts it; None if it does not.
        axis: The tensor axis' number in the mesh; None if it has none.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has state of its own mesh"
    on_axis = layout is not None and axis is not None
    # Whatever is strided in DTensor's words is a chunk of the tensor rank's part in ours.
    chunks = [
        Chunk(dim=cast(Any, placement).dim, index=coordinate[number], count=mesh.size(number))
        for number, placement in enumerate(placements)
        if not (on_axis and number == axis) and not isinstance(placement, Replicate)
    ]
    if layout is None or axis is None:
        return held_runs(shape, Layout(0, (shape[0],)), 0, 1, chunks)
    return held_runs(shape, layout, coordinate[axis], mesh.size(axis), chunks)


def gathered(shards: DTensor) -> Tensor:
    """Returns what DTensor takes for the whole tensor. All ranks of the mesh call it together."""
    placements = [*shards.placements]
    # One axis after the other, chunks of the ranks' parts first; torch warns of a redistribution of several.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        shards = DTensor.redistribute(shards, placements=placements)
    return shards.to_local()


def in_order(shards: DTensor, layout: Layout, axis: int) -> Tensor:
    """Returns the whole of a packed or padded tensor in its original order. All ranks of the mesh call it together.

    Args:
        shards: What this rank holds.
        layout: How the tensor axis cuts it.
        axis: The tensor axis' number in its mesh.
    """
    return layout.whole(gathered(shards).chunk(shards.device_mesh.size(axis), layout.dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How a mesh holds a parameter, its gradient and whatever has one number for each of its elements.

    Two tensors that are held alike have the same elements in the same places.

    Attributes:
        name: The parameter's first name.
        shape: Its original shape.
        mesh: All axes that it lies on.
        placements: What torch calls its cuts.
        layout: How the tensor axis cuts it; None if it does not.
        axis: The tensor axis' number in the mesh; None if it has none.
        runs: What this rank holds.
        cut: Whether ranks hold different parts.
        padded: Whether parts have zeros at their ends that are no elements.
        in_order: Whether it is what DTensor takes it for.
    """

    name: str = field(compare=False)
    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    layout: Layout | None
    axis: int | None
    runs: tuple[Run, ...] = field(compare=False)
    cut: bool
    padded: bool
    in_order: bool

    @classmethod
    def of(cls, name: str, parameter: DTensor, layout: Layout | None, axis_name: str) -> Self:
        """Returns how a parameter is held.

        Args:
            name: Its name.
            parameter: As this rank holds it.
            layout: How the tensor axis cuts it; None if it does not.
            axis_name: The tensor axis' name in a mesh.
        """
        mesh, placements, shape = parameter.device_mesh, tuple(parameter.placements), [*parameter.shape]
        names = mesh.mesh_dim_names or ()
        axis = names.index(axis_name) if axis_name in names else None
        if layout is not None:
            shape[layout.dim] = layout.length
        runs = runs_on_mesh(shape, mesh, placements, layout, axis) if shape else ()
        padded = layout is not None and axis is not None and not layout.fits(mesh.size(axis))
        return cls(
            name=name,
            shape=torch.Size(shape),
            mesh=mesh,
            placements=placements,
            layout=layout,
            axis=axis,
            runs=runs,
            cut=not all(isinstance(placement, Replicate) for placement in placements),
            padded=padded,
            in_order=layout is None or not (layout.packed or padded),
        )

    @property
    def dim(self) -> int:
        """The dim of which the runs are."""
        return 0 if self.layout is None else self.layout.dim

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor, which is equal on all ranks; a view where it can be one.

        Args:
            whole: In the original order; what is missing in its shape is broadcast.
            like: A part of the shape that is asked for.
        """
        whole = whole.expand(self.shape)
        if not self.cut:
            return whole
        pieces = [whole[run.block] for run in self.runs]
        if len(pieces) == 1 and pieces[0].shape == like.shape:
            return pieces[0]
        part = whole.new_zeros(like.shape)
        for run, piece in zip(self.runs, pieces, strict=True):
            part.narrow(self.dim, run.start, run.sizes[self.dim]).copy_(piece)
        return part

    def clear_padding(self, part: Tensor) -> None:
        """Makes zero what is no element of the tensor."""
        end = max((run.start + run.sizes[self.dim] for run in self.runs), default=0)
        part.narrow(self.dim, end, part.shape[self.dim] - end).zero_()

    def refusal(self, act: str, reason: str = "", *, fix: str | None = None) -> PartError:
        """Returns the error of what would not be exact.

        Args:
            act: What somebody does with the tensor.
            reason: More about it.
            fix: What to do instead.
        """
        return PartError(
            f"{act} on parameter '{self.name}', or on its gradient or what was computed from it, of shape "
            f"{tuple(self.shape)}: between steps each rank holds a part of it ({self})."
            + (f" {reason}" if reason else ""),
            valid="what acts on each element alone, together with tensors held alike or whole; norms and sums of all; "
            "tensor[...] = value; tensor.copy_(whole)",
            fix=fix
            or f"whole = trainer.strategy.full_tensor({self.name!r}, tensor) on every rank, and tensor.copy_(whole) to "
            "write",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __str__(self) -> str:
        cuts = [f"{place} of {self.mesh.size(number)}" for number, place in enumerate(self.placements)]
        segments = "" if self.layout is None or not self.layout.packed else f", each rank a part of every {self.layout}"
        return ", ".join(cuts) + segments
