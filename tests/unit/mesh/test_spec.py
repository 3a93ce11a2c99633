import pickle
import subprocess
import sys
from typing import Any

import pytest

from lightning_3d.errors import MeshError
from lightning_3d.mesh import AXES, Coordinate, MeshSpec
from lightning_3d.mesh.spec import GROUPS

HYBRID = MeshSpec(data=4, pipeline=2, tensor=2, data_replicate=2)


def test_default_order_puts_tensor_neighbours_side_by_side() -> None:
    spec = MeshSpec(data=2, pipeline=2, tensor=2)
    assert spec.world == 8
    assert spec.coordinate(5) == Coordinate(data=1, data_shard=1, pipeline=0, tensor=1)
    assert spec.group("tensor_parallel", 5) == (4, 5)
    assert spec.group("pipeline_parallel", 5) == (5, 7)
    assert spec.group("data_parallel", 5) == (1, 5)
    assert spec.group("model_parallel", 5) == (4, 5, 6, 7)


def test_another_order() -> None:
    spec = MeshSpec(data=2, pipeline=2, tensor=2, rank_order=("tensor", "pipeline", "data"))
    assert spec.groups("data_parallel") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert spec.group("model_parallel", 0) == (0, 4, 2, 6)


def test_replicas_split_the_data_axis() -> None:
    assert HYBRID.data_shard == 2
    assert HYBRID.coordinate(12) == Coordinate(data=3, data_replicate=1, data_shard=1)
    assert HYBRID.group("data_parallel", 12) == (0, 4, 8, 12)
    assert HYBRID.group("data_replicate", 12) == (4, 12)
    assert HYBRID.group("data_shard", 12) == (8, 12)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    "spec",
    [
        HYBRID,
        MeshSpec(data=3, pipeline=1, tensor=5),
        MeshSpec(data=6, pipeline=2, tensor=1, data_replicate=3, rank_order=("pipeline", "tensor", "data")),
    ],
    ids=str,
)
def test_groups_hold_every_rank_once(spec: MeshSpec, name: str) -> None:
    groups = spec.groups(name)
    assert sorted(rank for group in groups for rank in group) == list(range(spec.world))
    assert all(spec.group(name, rank) == group for group in groups for rank in group)
    assert {len(group) for group in groups} == {spec.size(name)}


def test_ten_thousand_ranks_round_trip() -> None:
    spec = MeshSpec(data=80, pipeline=16, tensor=8, data_replicate=10, rank_order=("pipeline", "data", "tensor"))
    assert spec.world == 10_240
    assert [spec.rank(spec.coordinate(rank)) for rank in range(spec.world)] == list(range(spec.world))
    assert len({spec.coordinate(rank) for rank in range(spec.world)}) == spec.world


def test_at_fills_both_parts_of_the_data_position() -> None:
    assert HYBRID.at(data=3, tensor=1) == Coordinate(data=3, data_replicate=1, data_shard=1, tensor=1)
    assert HYBRID.rank(HYBRID.at(data=3, tensor=1)) == 13


def test_every_axis_is_a_field_and_a_group() -> None:
    for axis in AXES:
        assert HYBRID.size(axis.key) == HYBRID.size(axis.name) == getattr(HYBRID, axis.key)


def test_text() -> None:
    assert str(MeshSpec(data=2, pipeline=1, tensor=4)) == "data 2 x pipeline 1 x tensor 4 = 8 ranks"
    text = str(MeshSpec(data=4, pipeline=1, tensor=1, data_replicate=2, rank_order=("tensor", "pipeline", "data")))
    assert text == "data 4 (2 replicas x 2) x pipeline 1 x tensor 1 = 4 ranks, ranks ordered tensor, pipeline, data"
    assert str(HYBRID.coordinate(12)) == "data 3 pipeline 0 tensor 0"


def test_values_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(HYBRID)) == HYBRID


@pytest.mark.parametrize(
    ("world", "degrees", "data"),
    [(8, {}, 8), (8, {"pipeline": 2}, 4), (12, {"pipeline": 2, "tensor": 3}, 2), (8, {"data": 8}, 8)],
)
def test_resolve(world: int, degrees: dict[str, Any], data: int) -> None:
    spec = MeshSpec.resolve(world, **degrees)
    assert (spec.data, spec.world) == (data, world)


def test_resolve_reads_the_order_as_text() -> None:
    assert MeshSpec.resolve(2, rank_order="tensor, pipeline,data").rank_order == ("tensor", "pipeline", "data")


@pytest.mark.parametrize(
    ("world", "degrees", "texts"),
    [
        (
            6,
            {"pipeline": 2, "tensor": 2},
            [
                "6 processes",
                "pipeline_parallel_size=2 x tensor_parallel_size=2",
                "multiple of 4",
                "pipeline_parallel_size in {1, 3}",
                "tensor_parallel_size in {1, 3}",
                "trainer.devices=4",
            ],
        ),
        (2, {"tensor": 3}, ["tensor_parallel_size in {1, 2}", "trainer.devices=3"]),
        (7, {"pipeline": 2, "tensor": 2}, ["degrees whose product divides 7", "trainer.devices=4"]),
        (
            8,
            {"data": 2, "pipeline": 2},
            [
                "= 4, but there are 8 processes",
                "trainer.devices=4",
                "or data_parallel_size=4 or pipeline_parallel_size=4 or tensor_parallel_size=2",
            ],
        ),
        (6, {"data": 2, "tensor": 4}, ["= 8, but there are 6 processes", "trainer.devices=8"]),
        (4, {"data": "many"}, ["data_parallel_size='many' is not a positive integer"]),
        (4, {"data": 0}, ["data_parallel_size=0"]),
        (4, {"pipeline": -1}, ["pipeline_parallel_size=-1"]),
        (4, {"tensor": True}, ["tensor_parallel_size=True"]),
        (4, {"tensor": 2.0}, ["tensor_parallel_size=2.0"]),
        (0, {}, ["number of processes=0"]),
        (
            6,
            {"data_replicate": 4},
            ["data_replicate_size=4 does not divide data_parallel_size=6", "1, 2, 3, 6", "size=2"],
        ),
        (4, {"data_replicate": 0}, ["data_replicate_size=0"]),
        (4, {"rank_order": "data,tensor"}, ["rank_order='data,tensor'", "permutation of data, pipeline, tensor"]),
        (4, {"rank_order": ("data", "data", "tensor")}, ["every axis once"]),
    ],
)
def test_degrees_that_do_not_fit(world: int, degrees: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        MeshSpec.resolve(world, **degrees)
    for text in texts:
        assert text in str(caught.value)


def test_positions_outside() -> None:
    with pytest.raises(MeshError, match="rank 16 is outside"):
        HYBRID.coordinate(16)
    with pytest.raises(MeshError, match="rank -1 is outside"):
        HYBRID.group("data_parallel", -1)
    with pytest.raises(MeshError, match="tensor position 2 is outside"):
        HYBRID.at(tensor=2)
    with pytest.raises(MeshError, match="data position 3 is not replica 0, shard 1"):
        HYBRID.rank(Coordinate(data=3, data_replicate=0, data_shard=1))


def test_unknown_group() -> None:
    with pytest.raises(MeshError, match="did you mean 'tensor_parallel'"):
        HYBRID.groups("tensor_paralel")


def test_the_arithmetic_needs_no_torch() -> None:
    # Named as the command line, which loads the strategies, and with them torch, only when it must.
    name = "import sys; sys.argv = ['lightning-3d']"
    use = "import lightning_3d.mesh, lightning_3d.mesh.topology"
    subprocess.run([sys.executable, "-c", f"{name}; {use}; assert 'torch' not in sys.modules"], check=True)
