from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.initial.materialise import cut, materialise
from lightning_3d.initial.record import InitRecorder
from lightning_3d.initial.replay import InitTape
from tests.unit.worlds import fake_world

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Uneven sizes, a tie, buffers of both kinds, a tensor in a plain attribute and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(7), persistent=False)
        self.register_buffer("kept", torch.tensor([1.5, 2.5]))
        self.plain = {"table": [torch.arange(3.0)], "again": self.kept}
        self.accuracy = MulticlassAccuracy(3)
        self.scalar = nn.Parameter(torch.tensor([0.5]))


def record(build: type[nn.Module] | Any) -> tuple[Any, InitTape]:
    recorder = InitRecorder(1)
    with recorder:
        module = build()
    return module, recorder.tape(module)


def shard(module: Tied, mesh: DeviceMesh, **options: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def expected_part(whole: Tensor, parameter: DTensor) -> Tensor:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 1), (8, 0), (8, 7)])
def test_fsdp_shards_are_the_right_slices(world: int, rank: int) -> None:
    module, tape = record(Tied)
    with fake_world(world, rank):
        shard(module, init_device_mesh("cpu", (world,)))
        identities = [id(parameter) for parameter in module.parameters()]
        materialise(module, tape, device=CPU)
        assert [id(parameter) for parameter in module.parameters()] == identities
        assert module.head.weight is module.embedding.weight
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.requires_grad
            local = parameter.to_local().detach()
            assert torch.equal(local, expected_part(tape.value(name), parameter)), name
        assert torch.equal(module.positions, torch.arange(7))
        assert torch.equal(module.kept, torch.tensor([1.5, 2.5]))
        assert torch.equal(module.norm.running_var, torch.ones(5))


@pytest.mark.parametrize("rank", range(6))
def test_hybrid_mesh_and_changed_dtype(rank: int) -> None:
    module, tape = record(Tied)
    module.to(torch.bfloat16)
    with fake_world(6, rank):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data_replicate", "data_shard"))
        shard(module, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        materialise(module, tape, device=CPU)
        for name, parameter in module.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.placements == (Replicate(), Shard(0))
            whole = tape.value(name)
            assert whole.dtype == torch.float32
            assert torch.equal(parameter.to_local().detach(), expected_part(whole.bfloat16(), parameter))


@pytest.mark.parametrize("rank", [0, 3, 5])
@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(-1)),
        (Shard(2), Shard(1)),
        (_StridedShard(0, split_factor=3), Shard(0)),
        (_StridedShard(1, split_factor=3), Shard(1)),
    ],
    ids=str,
)
def test_cut_equals_distribute_tensor(rank: int, placements: tuple[Placement, ...]) -> None:
    whole = torch.arange(13 * 11 * 2).view(13, 11, 2)
    with fake_world(6, rank):
        mesh = init_device_mesh("cpu", (2, 3))
        expected = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        assert torch.equal(cut(whole, mesh, placements), expected)


def test_tensor_axis_dtensors_and_plain_parameters_together() -> None:
    module, tape = record(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))

    def column(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(0)], src_data_rank=None))

    with fake_world(4, 2):
        distribute_module(module[0], init_device_mesh("cpu", (4,)), column)
        materialise(module, tape, device=CPU)
        assert torch.equal(module[0].weight.to_local(), tape.value("0.weight")[4:6])
        assert torch.equal(module[1].weight, tape.value("1.weight"))


def test_plain_tensors_keep_identity_attributes_ties_and_weak_references() -> None:
    module, tape = record(Tied)
    module.scalar.note = "kept"
    holders = weakref.ref(module.scalar), module.plain["table"][0], module.kept
    materialise(module, tape, device=CPU)
    assert holders[0]() is module.scalar
    assert module.scalar.note == "kept"
    assert module.scalar.item() == 0.5
    assert torch.equal(holders[1], torch.arange(3.0))
    assert module.plain["again"] is module.kept is holders[2]
    assert module.head.weight is module.embedding.weight
    assert not any(leaf.is_meta for leaf in tree_leaves(vars(module.accuracy)) if isinstance(leaf, Tensor))
    module.accuracy(torch.eye(3), torch.arange(3))
    assert module.accuracy.compute() == 1
    assert module.accuracy.to("cpu").tp.sum() == 3


def test_real_tensors_of_a_mixed_module_stay_as_they_are() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="cpu"))
        module.register_buffer("real", torch.full((2,), 4.0, device="cpu"))
        return module

    module, tape = record(build)
    weight, before = module[1].weight, module[1].weight.clone()
    assert "1.weight" not in tape
    materialise(module, tape, device=CPU)
    assert module[1].weight is weight
    assert torch.equal(weight, before)
    assert torch.equal(module.real, torch.full((2,), 4.0))
    assert torch.equal(module[0].weight, tape.value("0.weight"))


class PeakBytes(TorchDispatchMode):
    """The most bytes that live storages held, of those first seen inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize("layers", [4, 16])
def test_host_peak_is_one_parameter_beside_the_shards(layers: int) -> None:
    module, tape = record(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers))))
    with fake_world(8, 3):
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
        with PeakBytes() as memory:
            materialise(module, tape, device=CPU)
    shards = layers * (128 * 128 + 128) // 8 * 4
    largest = 128 * 128 * 4
    assert memory.now == pytest.approx(shards, abs=4096)
    assert memory.peak <= shards + 2 * largest
    assert memory.peak >= shards + largest


def test_intermediate_results_are_freed_while_replaying() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        value = torch.ones(128, 128)
        for _ in range(20):
            value = value * 2
        module.weight = nn.Parameter(value)
        return module

    _, tape = record(build)
    with PeakBytes() as memory:
        assert tape.value("weight").eq(2**20).all()
    assert memory.peak <= 4 * 128 * 128 * 4


@pytest.mark.parametrize("sharded", [False, True])
def test_absent_parameters_stay_as_they_are(sharded: bool) -> None:
    module, tape = record(Tied)
    absent = {"embedding.weight", "layers.1.weight", "layers.1.bias"}
    table = module.embedding.weight
    table.no_decay = True
    with fake_world(2, 1):
        if sharded:
            fully_shard([module.layers[0], module.layers[2]], mesh=init_device_mesh("cpu", (2,)))
        materialise(module, tape, device=CPU, absent=absent)
        for name, parameter in module.named_parameters():
            assert parameter.is_meta == (name in absent), name
            if name not in absent:
                cut = isinstance(parameter, DTensor)
                local = parameter.to_local() if cut else parameter
                whole = tape.value(name)
                assert torch.equal(local, expected_part(whole, parameter) if cut else whole), name
    assert module.head.weight is module.embedding.weight is table
    assert table.no_decay
    assert not any(buffer.is_meta for buffer in module.buffers())


@pytest.mark.parametrize("sharded", [False, True])
def test_absent_parameters_never_have_memory(sharded: bool) -> None:
    module, tape = record(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(16))))
    absent = {name for name, _ in module.named_parameters() if int(name.split(".")[0]) >= 2}
    with fake_world(2, 0):
        if sharded:
            fully_shard([module[0], module[1]])
        with PeakBytes() as memory:
            materialise(module, tape, device=CPU, absent=absent)
    held = 2 * (128 * 128 + 128) * 4 // (2 if sharded else 1)
    assert memory.now == pytest.approx(held, abs=4096)
    assert memory.peak <= held + 2 * 128 * 128 * 4
