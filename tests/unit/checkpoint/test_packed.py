"""Packed parameters in a checkpoint: what each rank holds, and what a state dict's values can do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d.checkpoint.layout import every_name, laid_out, module_state, module_tensors
from lightning_3d.checkpoint.packed import PackedTensor, packed, packed_like, unpacked
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.shards.held import Chunk, held_runs
from lightning_3d.shards.layout import Layout
from tests.spmd.packed import TIED, Stack, cut_over, expected_part, mesh_of, packed_of
from tests.unit.worlds import fake_world

QKV = Layout(0, (4, 4, 4))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(0, (8, 8, 8)),
        Layout(0, (16, 4, 4)),
        Layout(1, (4, 8)),
        Layout(0, (8,)),
        Layout(0, (11,)),
        Layout(1, (11,)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("counts", [(), (2,), (3,), (5,), (2, 2)], ids=str)
def test_runs_are_the_parts_of_all_ranks(layout: Layout, size: int, counts: tuple[int, ...]) -> None:
    whole = torch.arange(layout.length * 3).view(layout.length, 3)
    if layout.dim == 1:
        whole = whole.t().contiguous()
    seen = torch.zeros_like(whole)
    for rank in range(size):
        for indices in torch.cartesian_prod(torch.tensor([0]), *(torch.arange(count) for count in counts)).view(
            -1, len(counts) + 1
        ):
            part = layout.padded(layout.part(whole, rank, size), size)
            chunks = []
            for index, count in zip(indices[1:].tolist(), counts, strict=True):
                pieces = part.chunk(count)
                part = pieces[index] if index < len(pieces) else part[:0]
                chunks.append(Chunk(dim=0, index=index, count=count))
            runs = held_runs(whole.shape, layout, rank, size, chunks)
            for run in runs:
                block = tuple(slice(at, at + length) for at, length in zip(run.offsets, run.sizes, strict=True))
                assert torch.equal(part.narrow(layout.dim, run.start, run.sizes[layout.dim]), whole[block])
                seen[block] += 1
            assert layout.length % size or sum(run.sizes.numel() for run in runs) == part.numel()
    assert torch.equal(seen, torch.ones_like(whole))


def test_a_run_is_as_long_as_it_can_be() -> None:
    (first, second) = held_runs((24, 3), Layout(0, (8, 16)), 1, 2, [Chunk(dim=0, index=0, count=2)])
    assert (first.offsets, first.sizes, first.start) == ((4, 0), (4, 3), 0)
    assert (second.offsets, second.sizes, second.start) == ((16, 0), (2, 3), 4)


@pytest.mark.parametrize(
    "spec",
    [
        mesh_of(1, 4),
        mesh_of(2, 2),
        mesh_of(4, 2),
        mesh_of(4, 2, 2),
        mesh_of(2, 2, 2),
    ],
    ids=str,
)
def test_shards_of_every_mesh_know_their_place(spec: MeshSpec) -> None:
    torch.manual_seed(1)
    plain = Stack()
    original = module_state(plain)
    layouts = packed_of(spec.tensor)
    seen = {name: torch.zeros_like(original[name]) for name in layouts}
    for rank in range(spec.world):
        with fake_world(spec.world, rank):
            state = module_state(cut_over(copy.deepcopy(plain), spec), layouts)
            assert {name for name, value in state.items() if isinstance(value, PackedTensor)} == {*layouts, TIED}
            assert state[TIED] is state["blocks.1.unequal.weight"]
            for name, layout in layouts.items():
                whole, value = original[name], state[name]
                assert value.shape == whole.shape
                assert torch.equal(value.shards.to_local(), expected_part(whole, spec, rank, layout)), name
                for chunk in value.__create_chunk_list__():
                    ends = zip(chunk.offsets, chunk.sizes, strict=True)
                    block = tuple(slice(start, start + size) for start, size in ends)
                    mine = value.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
                    assert torch.equal(mine, whole[block])
                    seen[name][block] += 1
    assert all(torch.equal(counts, torch.full_like(counts, spec.data_replicate)) for counts in seen.values())


@pytest.mark.parametrize("spec", [mesh_of(1, 2), mesh_of(4, 2, 2)], ids=str)
def test_whole_tensors_are_cut_without_communication(spec: MeshSpec) -> None:
    torch.manual_seed(1)
    plain, other = Stack(), Stack()
    original, layouts = module_state(plain), packed_of(spec.tensor)
    for rank in range(spec.world):
        with fake_world(spec.world, rank):
            targets = module_tensors(cut_over(copy.deepcopy(other), spec), layouts)
            for name, layout in layouts.items():
                # A collective of the fake group would leave foreign parts as they were.
                result = unpacked(laid_out(original[name], targets[name]))
                assert isinstance(result, DTensor)
                assert torch.equal(result.to_local(), expected_part(original[name], spec, rank, layout)), name


@pytest.fixture
def value() -> Iterator[PackedTensor]:
    with fake_world(2, 1):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
        shards = DTensor.from_local(torch.arange(12.0).view(6, 2), mesh, [Shard(0)], run_check=False)
        yield packed(nn.Parameter(shards), QKV)


def test_shares_its_storage_and_its_properties(value: PackedTensor) -> None:
    local = value.shards.to_local()
    assert (value.shape, value.numel(), value.dtype) == ((12, 2), 24, torch.float32)
    assert (value.device, value.layout, value.requires_grad) == (torch.device("cpu"), torch.strided, False)
    assert str(value) == "PackedTensor((12, 2), torch.float32, dim 0 in 4|4|4)"
    value.detach().__get_tensor_shard__(MetadataIndex("", torch.Size([2, 0]))).fill_(7)
    assert torch.equal(local[:2], torch.full((2, 2), 7.0))
    assert torch.equal(local[2:], torch.arange(4.0, 12).view(4, 2))


def test_is_written_run_by_run(value: PackedTensor) -> None:
    items = value.__create_write_items__("weight", value)
    assert [item.index for item in items] == [
        MetadataIndex("weight", torch.Size(offset)) for offset in ([2, 0], [6, 0], [10, 0])
    ]
    assert {item.type for item in items} == {WriteItemType.SHARD}
    assert {(item.tensor_data.size, item.tensor_data.chunk.sizes) for item in items} == {((12, 2), (2, 2))}
    assert {item.tensor_data.properties.dtype for item in items} == {torch.float32}


@pytest.mark.parametrize(
    ("act", "dtype", "copied"),
    [
        (lambda value: value.detach(), torch.float32, False),
        (lambda value: value.cpu(), torch.float32, False),
        (lambda value: value.to(torch.bfloat16), torch.bfloat16, True),
        (lambda value: value.double(), torch.float64, True),
        (lambda value: value.clone(), torch.float32, True),
        (copy.deepcopy, torch.float32, True),
        (lambda value: torch.empty_like(value, dtype=torch.float16).copy_(value), torch.float16, True),
    ],
    ids=["detach", "cpu", "to", "double", "clone", "deepcopy", "copy_"],
)
def test_what_hooks_do_with_values(
    value: PackedTensor, act: Callable[[Tensor], Tensor], dtype: torch.dtype, copied: bool
) -> None:
    result = act(value)
    assert isinstance(result, PackedTensor)
    assert (result.shape, result.dtype, result.packing) == (value.shape, dtype, QKV)
    local, mine = value.shards.to_local(), result.shards.to_local()
    assert torch.equal(mine, local.to(dtype))
    assert (mine.data_ptr() != local.data_ptr()) == copied


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda value: value * 2, "aten.mul"),
        (lambda value: value[0], "aten.select"),
        (lambda value: value.copy_(torch.zeros(12, 2)), "aten.copy_"),
        (lambda value: value.copy_(packed(value.shards, Layout(0, (8, 4)))), "aten.copy_"),
        (lambda value: torch.equal(value, value), "aten.equal"),
    ],
    ids=["mul", "index", "copy_ from whole", "copy_ from another packing", "equal"],
)
def test_other_operations_are_named_errors(value: PackedTensor, act: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} does not work") as caught:
        act(value)
    assert "full_tensor()" in caught.value.fix


def test_what_is_not_packed_stays_as_it_is() -> None:
    with fake_world(2, 0):
        tensor = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
        data = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
        one = DTensor.from_local(torch.ones(6, 2), tensor, [Shard(0)], run_check=False)
        other = DTensor.from_local(torch.ones(6, 2), data, [Shard(0)], run_check=False)
        for same, layout in [(one, None), (one, Layout(0, (12,))), (other, QKV), (torch.ones(12, 2), QKV), ("x", QKV)]:
            assert packed(same, layout) is same
        assert packed(packed(one, QKV), QKV).shards.to_local().data_ptr() == one.to_local().data_ptr()


def test_layouts_of_tied_parameters_have_all_names() -> None:
    layouts = packed_of(2)
    assert TIED not in layouts
    assert every_name(Stack(), layouts) == layouts | {TIED: layouts["blocks.1.unequal.weight"]}


def test_state_with_rows_of_unknown_order_is_refused(value: PackedTensor) -> None:
    mesh = value.device_mesh
    rows = DTensor.from_local(torch.ones(6, 1), mesh, [Shard(0)], run_check=False)
    columns = DTensor.from_local(torch.ones(1, 2), mesh, [Replicate()], run_check=False)
    step = torch.tensor(3.0)
    assert packed_like(columns, value, "w") is columns
    assert packed_like(step, value, "w") is step
    assert packed_like(rows, None, "w") is rows
    moment = packed_like(torch.zeros_like(value.shards), value, "w")
    assert isinstance(moment, PackedTensor)
    with pytest.raises(CheckpointError, match=r"w of shape \(12, 2\) .* state of shape \(12, 1\)"):
        packed_like(rows, value, "w")


def test_layouts_are_found_through_the_wrappers_of_compiled_parts() -> None:
    module = nn.ModuleDict({"part": nn.ModuleDict({"_orig_mod": nn.Linear(4, 12)})})
    assert every_name(module, {"part._orig_mod.weight": QKV}) == {"part.weight": QKV}
    assert every_name(module, {"part.weight": QKV}) == {"part.weight": QKV}
