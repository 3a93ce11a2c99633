import pytest

from lightning_3d.errors import MeshError
from lightning_3d.mesh import MeshSpec
from lightning_3d.mesh.topology import Topology


def test_tensor_inside_the_node() -> None:
    topology = Topology(spec=MeshSpec(data=2, pipeline=2, tensor=4), devices_per_node=4)
    assert topology.nodes == 4
    assert topology.node(5) == 1
    assert topology.span("tensor_parallel").nodes == 1
    assert topology.span("pipeline_parallel").crossing == 8
    assert topology.advice() == ()


def test_an_order_that_sends_tensor_traffic_over_nodes() -> None:
    spec = MeshSpec(data=4, pipeline=1, tensor=4, rank_order=("tensor", "pipeline", "data"))
    (advice,) = Topology(spec=spec, devices_per_node=4).advice()
    assert "set rank_order='data,pipeline,tensor'" in advice


def test_another_order_that_costs_nothing_is_left_alone() -> None:
    spec = MeshSpec(data=4, pipeline=1, tensor=4, rank_order=("pipeline", "data", "tensor"))
    assert Topology(spec=spec, devices_per_node=4).advice() == ()


@pytest.mark.parametrize("tensor", [8, 3])
def test_tensor_degree_that_does_not_fit_a_node(tensor: int) -> None:
    (advice,) = Topology(spec=MeshSpec(data=4, pipeline=1, tensor=tensor), devices_per_node=4).advice()
    assert f"tensor_parallel_size={tensor} cannot stay inside nodes of 4 devices" in advice


def test_small_worlds_show_every_rank() -> None:
    text = str(Topology(spec=MeshSpec(data=2, pipeline=2, tensor=2), devices_per_node=4))
    assert text.splitlines() == [
        "data 2 x pipeline 2 x tensor 2 = 8 ranks on 2 nodes of 4",
        "tensor_parallel    size 2     4 groups, inside a node",
        "pipeline_parallel  size 2     4 groups, inside a node",
        "data_parallel      size 2     4 groups, 4 of 4 cross nodes (up to 2)",
        "rank 0     node 0    data 0 pipeline 0 tensor 0",
        "rank 1     node 0    data 0 pipeline 0 tensor 1",
        "rank 2     node 0    data 0 pipeline 1 tensor 0",
        "rank 3     node 0    data 0 pipeline 1 tensor 1",
        "rank 4     node 1    data 1 pipeline 0 tensor 0",
        "rank 5     node 1    data 1 pipeline 0 tensor 1",
        "rank 6     node 1    data 1 pipeline 1 tensor 0",
        "rank 7     node 1    data 1 pipeline 1 tensor 1",
    ]


def test_one_node_and_one_group() -> None:
    text = str(Topology(spec=MeshSpec(data=1, pipeline=1, tensor=2), devices_per_node=2))
    assert text.splitlines()[:2] == [
        "data 1 x pipeline 1 x tensor 2 = 2 ranks on 1 node of 2",
        "tensor_parallel    size 2     1 group, inside a node",
    ]
    assert str(MeshSpec(data=1, pipeline=1, tensor=1)) == "data 1 x pipeline 1 x tensor 1 = 1 rank"


def test_large_worlds_show_a_row_per_node_and_leave_out_the_middle() -> None:
    text = str(Topology(spec=MeshSpec(data=80, pipeline=16, tensor=8, data_replicate=10), devices_per_node=8))
    rows = text.splitlines()
    assert len(rows) == 18
    assert "data_shard         size 8     1280 groups, 1280 of 1280 cross nodes (up to 8)" in rows
    assert "node 1     ranks 8-15           data 0  pipeline 1  tensor 0-7" in rows
    assert "... 1269 more nodes" in rows
    assert "node 1279  ranks 10232-10239    data 79  pipeline 15  tensor 0-7" in rows


def test_a_row_per_node_shows_gaps() -> None:
    spec = MeshSpec(data=4, pipeline=10, tensor=1, rank_order=("pipeline", "data", "tensor"))
    assert "node 9     ranks 36-39          data 0-3  pipeline 9  tensor 0" in str(
        Topology(spec=spec, devices_per_node=4)
    )
    assert "data 0,2,3" in str(Topology(spec=spec, devices_per_node=3))


def test_a_node_without_devices() -> None:
    with pytest.raises(MeshError, match="holds no rank"):
        Topology(spec=MeshSpec(data=2, pipeline=1, tensor=1), devices_per_node=0)
