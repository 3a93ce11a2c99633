from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.errors import MeshError
from lightning_3d.mesh import AXES, MeshSpec
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, data_mesh

SPECS = [
    MeshSpec(data=1, pipeline=1, tensor=1),
    MeshSpec(data=2, pipeline=2, tensor=2),
    MeshSpec(data=3, pipeline=2, tensor=4),
    MeshSpec(data=2, pipeline=3, tensor=2, rank_order=("tensor", "pipeline", "data")),
    MeshSpec(data=2, pipeline=2, tensor=3, rank_order=("pipeline", "data", "tensor")),
    MeshSpec(data=4, pipeline=2, tensor=2, data_replicate=2),
    MeshSpec(data=6, pipeline=2, tensor=2, data_replicate=3, rank_order=("pipeline", "tensor", "data")),
]


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equal_to_the_arithmetic(spec: MeshSpec) -> None:
    for rank in {0, 1 % spec.world, spec.world // 2, spec.world - 1}:
        with fake_world(rank, spec.world):
            mesh = build_device_mesh(spec, "cpu")
            here = spec.coordinate(rank)
            for axis in AXES:
                sub = data_axis_mesh(mesh) if axis.key == "data" else mesh[axis.name]
                assert tuple(sub.mesh.tolist()) == spec.group(axis.name, rank)
                assert sub.get_local_rank() == getattr(here, axis.key)
                assert tuple(dist.get_process_group_ranks(sub.get_group())) == tuple(
                    sorted(spec.group(axis.name, rank))
                )


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.data_replicate > 1], ids=str)
def test_replicas_and_shards(spec: MeshSpec) -> None:
    rank = spec.world - 2
    with fake_world(rank, spec.world):
        mesh = build_device_mesh(spec, "cpu")
        hybrid = data_mesh(mesh)
        assert hybrid.mesh_dim_names == ("data_replicate", "data_shard")
        assert tuple(hybrid.shape) == (spec.data_replicate, spec.data_shard)
        assert hybrid.mesh.flatten().tolist() == list(spec.group("data_parallel", rank))
        for name in ("data_replicate", "data_shard"):
            assert tuple(mesh[name].mesh.tolist()) == spec.group(name, rank)
        with pytest.warns(UserWarning, match="flattened dim"):
            assert mesh["data_parallel"] == data_axis_mesh(mesh)
        assert mesh.get_group("data_parallel") is data_axis_mesh(mesh).get_group()


def test_without_replicas_the_data_mesh_is_the_data_axis() -> None:
    with fake_world(0, 4):
        mesh = build_device_mesh(MeshSpec(data=2, pipeline=1, tensor=2), "cpu")
        assert mesh.mesh_dim_names == ("data_parallel", "pipeline_parallel", "tensor_parallel")
        assert data_mesh(mesh) == data_axis_mesh(mesh) == mesh["data_parallel"]


def test_ten_thousand_ranks() -> None:
    spec = MeshSpec(data=80, pipeline=16, tensor=8, data_replicate=10)
    with fake_world(5_003, spec.world), torch.device("meta"):
        mesh = build_device_mesh(spec, "cpu")
        assert tuple(data_axis_mesh(mesh).mesh.tolist()) == spec.group("data_parallel", 5_003)


def test_a_process_group_of_another_size() -> None:
    with fake_world(0, 4), pytest.raises(MeshError, match="process group has 4 ranks"):
        build_device_mesh(MeshSpec(data=2, pipeline=1, tensor=1), "cpu")
