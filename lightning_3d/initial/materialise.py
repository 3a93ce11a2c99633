"""Materialising: a module on the meta device gets memory on this rank's device, and its part of the initial values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_3d.graph.parameters import marks_kept
from lightning_3d.initial.replay import InitTape
from lightning_3d.initial.tensors import named_tensors
from lightning_3d.shards.layout import Layout, by_rank


def materialise(
    module: nn.Module,
    tape: InitTape,
    *,
    device: torch.device,
    parameters_on: torch.device | None = None,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    absent: Collection[str] = (),
) -> None:
    """Gives a module's meta tensors memory and their recorded initial values, without communication.

    Every tensor keeps its identity, its attributes and its ties. Values are computed on the host one at a time, cut by
    the placements of a DTensor, cast to the present dtype, and freed, so the host holds at most one whole tensor beside
    the module. Tensors that are real already keep their values and move to the device.

    Args:
        module: The module that the tape was bound to, its parameters plain or cut into DTensors since.
        tape: Its initial values by name.
        device: This rank's device.
        parameters_on: The device of parameters, if not ``device``: the CPU when they are offloaded.
        layouts: How parameters are cut over the tensor axis, the last of their mesh, by their first names.
        absent: First names of parameters that stay on the meta device, since other pipeline ranks hold them.
    """
    parameters_on = parameters_on or device
    waiting = {id(tensor): name for name, tensor in reversed([*named_tensors(module)]) if tensor.is_meta}
    waiting = {key: name for key, name in waiting.items() if name not in absent}
    sharded = []
    for name, tensor in [*named_tensors(module)]:
        if waiting.get(id(tensor)) != name:
            continue
        if isinstance(tensor, DTensor):
            sharded.append((name, tensor))
        else:
            target = parameters_on if isinstance(tensor, nn.Parameter) else device
            _replace(tensor, tape.value(name).to(target, tensor.dtype))
    _allocate(module, device, parameters_on, waiting)
    for name, tensor in sharded:
        _fill(tensor, tape.value(name), layouts.get(name))


def cut(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Cuts this rank's part out of a whole tensor, as ``distribute_tensor`` does but where the tensor lies.

    Args:
        whole: The global tensor, on any device.
        mesh: The mesh of the DTensor.
        placements: Its placements, one per mesh dimension; uneven parts follow ``torch.chunk``.

    Returns:
        A view of the part, empty where this rank has none.
    """
    part = whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only ranks of a parameter's mesh hold a part of it"
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        assert dim is not None, f"parameters are sharded or replicated, not {placement}"
        # FSDP on a tensor axis cuts what the later axis has cut before: each of its pieces, then joined.
        pieces = part.chunk(getattr(placement, "split_factor", 1), dim)
        mine = [_chunk(piece, mesh.size(axis), coordinate[axis], dim) for piece in pieces]
        part = mine[0] if len(mine) == 1 else torch.cat(mine, dim)
    return part


def _chunk(whole: Tensor, count: int, index: int, dim: int) -> Tensor:
    pieces = whole.chunk(count, dim)
    return pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)


def _replace(meta: Tensor, value: Tensor) -> None:
    """Turns a meta tensor into a real one, for everybody who holds it, with its attributes."""
    if isinstance(meta, nn.Parameter):
        value = nn.Parameter(value, requires_grad=meta.requires_grad)
    # What torch.utils.swap_tensors does, but that refuses tensors with weak references, which nn.LSTM keeps.
    torch._C._swap_tensor_impl(meta, value)


def _allocate(module: nn.Module, device: torch.device, parameters_on: torch.device, waiting: Collection[int]) -> None:
    """Gives sharded parameters empty memory and moves what is real; FSDP hears of it through the module."""
    parameters = {id(parameter) for parameter in module.parameters()}

    def placed(tensor: Tensor) -> Tensor:
        target = parameters_on if id(tensor) in parameters else device
        if not tensor.is_meta:
            return tensor.to(target)
        return torch.empty_like(tensor, device=target) if id(tensor) in waiting else tensor

    # torch swaps in tensors without what users have set on the old ones.
    with marks_kept(module):
        module._apply(placed)


def _fill(parameter: DTensor, whole: Tensor, layout: Layout | None) -> None:
    if layout is not None:
        whole = by_rank(whole, layout.dim, layout.segments, parameter.device_mesh.size(-1))
    with torch.no_grad():
        parameter.to_local().copy_(cut(whole, parameter.device_mesh, parameter.placements))
