"""Packed and padded parameters in a checkpoint: every rank says which original rows it holds, run by run.

What DTensor takes for the whole of such a parameter is in another order than the model's own, or longer.
:class:`PackedTensor` stands for it wherever it leaves or enters a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.errors import CheckpointError
from lightning_3d.mesh.spec import TENSOR_AXIS
from lightning_3d.shards.alike import layout_of
from lightning_3d.shards.held import Run, in_order, runs_on_mesh
from lightning_3d.shards.layout import Layout

# Layouts of a module that has nothing packed or padded.
NO_LAYOUTS: Mapping[str, Layout] = MappingProxyType({})

_aten = torch.ops.aten
# What may happen to a value of a state dict: it acts on each element alone, so the order does not matter.
_ELEMENTWISE = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.copy_.default,
)


class PackedTensor(Tensor):
    """A packed or padded DTensor with the shape and the order of the original tensor. Shares the DTensor's storage.

    It speaks the protocol of torch.distributed.checkpoint for sharded tensors, one chunk for each run of original rows.
    Copies, casts and moves work as on any tensor.

    Args:
        shards: A DTensor that is ``Shard(packing.dim)`` on the tensor axis, in the order of the ranks' parts.
        packing: How the tensor axis cut the original tensor.
    """

    shards: DTensor
    packing: Layout

    def __new__(cls, shards: DTensor, packing: Layout) -> PackedTensor:
        """Makes a tensor of the original shape without memory of its own."""
        shape = [*shards.shape]
        shape[packing.dim] = packing.length
        return Tensor._make_wrapper_subclass(cls, shape, dtype=shards.dtype, device=shards.device)

    def __init__(self, shards: DTensor, packing: Layout) -> None:
        self.shards = cast(DTensor, shards.detach())
        self.packing = packing

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        packings = {value.packing if isinstance(value, PackedTensor) else None for value in tensors}
        if func not in _ELEMENTWISE or len(packings) != 1 or None in packings:
            raise CheckpointError(
                f"{func.overloadpacket} does not work on the shards of a packed parameter in a state dict",
                valid="detach, clone, to, copy_ from another packed one, empty_like, full_tensor",
                fix="compute on tensor.full_tensor(), on every rank, and put the result in its place",
            )
        # Nobody else ever writes to the padding.
        act = _aten.zeros_like.default if func is _aten.empty_like.default else func
        result = act(*(unpacked(value) for value in args), **(kwargs or {}))
        return args[0] if func is _aten.copy_.default else PackedTensor(result, args[0].packing)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that holds the shards."""
        return self.shards.device_mesh

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor in its original order. All ranks of the mesh call it together."""
        return in_order(self.shards, self.packing, _tensor_axis(self.device_mesh))

    def runs(self) -> tuple[Run, ...]:
        """Returns which blocks of the original tensor this rank holds."""
        mesh = self.device_mesh
        return runs_on_mesh(self.shape, mesh, self.shards.placements, self.packing, _tensor_axis(mesh))

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.shards.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(run.offsets, run.sizes) for run in self.runs()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        dim = self.packing.dim
        run = next(run for run in self.runs() if run.offsets == index.offset)
        return self.shards.to_local().narrow(dim, run.start, run.sizes[dim])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedTensor({tuple(self.shape)}, {self.dtype}, {self.packing})"


def packed(value: Any, layout: Layout | None) -> Any:
    """Returns what stands for a parameter in a checkpoint: one in original order if it is packed or padded.

    Args:
        value: A parameter or a state dict's value for it.
        layout: How the tensor axis cuts it, None if it does not; one between steps knows it.
    """
    layout = layout_of(value) or layout
    if layout is None or not isinstance(value, DTensor):
        return value
    if TENSOR_AXIS not in (value.device_mesh.mesh_dim_names or ()):
        return value
    axis = _tensor_axis(value.device_mesh)
    if not layout.packed and layout.fits(value.device_mesh.size(axis)):
        return value
    placement = value.placements[axis]
    assert placement.is_shard(layout.dim), f"{placement} on the tensor axis for a parameter cut on {layout}"
    return PackedTensor(value, layout)


def packed_like(value: Tensor, parameter: Tensor | None, owner: str) -> Tensor:
    """Returns what stands for a tensor of a parameter's optimizer state in a checkpoint.

    Args:
        value: The tensor.
        parameter: What stands for the parameter.
        owner: The parameter's name, for errors.

    Raises:
        CheckpointError: The parameter is packed or padded, and the tensor holds its rows in a form whose order is not
            known.
    """
    if not isinstance(parameter, PackedTensor) or not isinstance(value, DTensor):
        return value
    if value.shape == parameter.shards.shape and value.placements == parameter.shards.placements:
        return PackedTensor(value, parameter.packing)
    check_free(value.shape, parameter, owner)
    return value


def check_free(shape: torch.Size, parameter: PackedTensor, owner: str) -> None:
    """Refuses a state tensor that is not shaped as its parameter but holds something for each packed or padded row.

    Args:
        shape: The state tensor's shape.
        parameter: What stands for the parameter.
        owner: The parameter's name.

    Raises:
        CheckpointError: Names the parameter and both shapes.
    """
    dim = parameter.packing.dim
    if {parameter.shape[dim], parameter.shards.shape[dim]} & {*shape[: dim + 1]}:
        raise CheckpointError(
            f"{owner} of shape {tuple(parameter.shape)} is cut on {parameter.packing}, and its optimizer keeps state "
            f"of shape {tuple(shape)}, whose original order is not known",
            fix=f"an optimizer whose state has the parameter's shape (AdamW, SGD), or tensor_plan={{{owner!r}: "
            "'replicate'}",
        )


def unpacked(value: Any) -> Any:
    """Returns the DTensor behind a packed value, other values as they are."""
    return value.shards if isinstance(value, PackedTensor) else value


def _tensor_axis(mesh: DeviceMesh) -> int:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names.index(TENSOR_AXIS)
