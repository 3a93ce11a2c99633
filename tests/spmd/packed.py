"""A module with every way in which the tensor axis cuts parameters, cut by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d.mesh.device import build_device_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.shards.layout import Layout

WIDTH = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 24)
        self.unequal = nn.Linear(WIDTH, 16)
        # As in GPT2's Conv1D, the features of the output are on dim 1.
        self.swapped = nn.Parameter(torch.randn(WIDTH, 24))
        # One row: with a data axis, some ranks hold nothing of it.
        self.single = nn.Parameter(torch.randn(1, 12))
        self.column = nn.Linear(WIDTH, 8)
        self.row = nn.Linear(8, WIDTH)
        self.register_buffer("seen", torch.ones(()))


class Stack(nn.Module):
    """Two blocks that share a packed weight, and a norm that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].unequal.weight = self.blocks[0].unequal.weight
        self.norm = nn.LayerNorm(WIDTH)
        # Two tensor ranks cut these in three rows each; four leave them whole.
        self.odd = nn.Linear(3, 6)
        self.uneven = nn.Linear(3, 6)
        # No number of ranks divides these; the last part is padded.
        self.words = nn.Embedding(11, 3)
        self.turned = nn.ParameterList([torch.randn(3, 11)])


_CUTS: Mapping[str, Layout] = {
    f"blocks.{number}.{name}": layout
    for number in range(2)
    for name, layout in {
        "fused.weight": Layout(0, (8, 8, 8)),
        "fused.bias": Layout(0, (8, 8, 8)),
        "unequal.weight": Layout(0, (8, 4, 4)),
        "unequal.bias": Layout(0, (8, 4, 4)),
        "swapped": Layout(1, (8, 8, 8)),
        "single": Layout(1, (4, 8)),
        "column.weight": Layout(0, (8,)),
        "column.bias": Layout(0, (8,)),
        "row.weight": Layout(1, (8,)),
    }.items()
} | {
    "odd.weight": Layout(0, (2, 2, 2)),
    "odd.bias": Layout(0, (2, 2, 2)),
    "uneven.weight": Layout(0, (6,)),
    "uneven.bias": Layout(0, (6,)),
    "words.weight": Layout(0, (11,)),
    "turned.0": Layout(1, (11,)),
}
TIED = "blocks.0.unequal.weight"


def cuts_of(tensor: int) -> dict[str, Layout]:
    """Returns how a tensor axis of this degree cuts the parameters of a `Stack`."""
    return {name: layout for name, layout in _CUTS.items() if layout.fits(tensor, padded=True)}


def packed_of(tensor: int) -> dict[str, Layout]:
    """Returns the packed and padded ones; a tied parameter needs one of its names only, whichever."""
    return {
        name: layout
        for name, layout in cuts_of(tensor).items()
        if (layout.packed or not layout.fits(tensor)) and name != TIED
    }


def cut_over(module: Stack, spec: MeshSpec) -> Stack:
    """Cuts a module over a mesh: its parameters over the tensor axis, and those parts over the data axis."""
    mesh = build_device_mesh(spec, "cpu")
    if spec.tensor > 1:
        cut_parameters(module, mesh["tensor_parallel"], cuts_of(spec.tensor))
    if spec.data > 1:
        data = data_mesh(mesh)
        # One unit: a parameter of two units would be in neither.
        fully_shard([*module.blocks], mesh=data)
        fully_shard(module, mesh=data)
    return module


def cut_parameters(module: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Layout]) -> None:
    """Makes every parameter that is here a DTensor on the tensor axis: this rank's part, or the whole."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            continue
        owner, _, own_name = name.rpartition(".")
        if parameter not in made:
            made[parameter] = _cut(parameter, mesh, cuts.get(name))
        setattr(module.get_submodule(owner), own_name, made[parameter])


def _cut(parameter: Tensor, mesh: DeviceMesh, layout: Layout | None) -> nn.Parameter:
    local, placement = parameter.detach(), Replicate()
    if layout is not None:
        part, placement = layout.part(local, mesh.get_local_rank(), mesh.size()), Shard(layout.dim)
        local = layout.padded(part, mesh.size()).contiguous()
    shards = DTensor.from_local(local, mesh, [placement], run_check=False)
    return nn.Parameter(shards, requires_grad=parameter.requires_grad)


def expected_part(whole: Tensor, spec: MeshSpec, rank: int, layout: Layout | None) -> Tensor:
    """Returns what a rank of a mesh holds of a whole tensor."""
    here = spec.coordinate(rank)
    part = whole if layout is None else layout.padded(layout.part(whole, here.tensor, spec.tensor), spec.tensor)
    chunks = part.chunk(spec.data_shard)
    return chunks[here.data_shard] if here.data_shard < len(chunks) else part[:0]


def mesh_of(data: int, tensor: int, replicas: int = 1) -> MeshSpec:
    """Returns a mesh without a pipeline axis."""
    return MeshSpec(data=data, pipeline=1, tensor=tensor, data_replicate=replicas)
