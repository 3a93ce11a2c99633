from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.counters import CollectiveCounter, CollectiveRow
from lightning_3d.counters.collectives import operation_of

NAMES = ("data_parallel", "tensor_parallel")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield init_device_mesh("cpu", (4, 2), mesh_dim_names=NAMES)
    dist.destroy_process_group()


def row(counter: CollectiveCounter) -> CollectiveRow:
    (only,) = counter.table.rows
    return only


def test_calls_payload_and_wire(mesh: DeviceMesh) -> None:
    with CollectiveCounter(mesh) as counter:
        dist.all_reduce(torch.ones(10), group=mesh.get_group("data_parallel"))
        dist.all_reduce(torch.ones(6), group=mesh.get_group("data_parallel"), async_op=True).wait()
    assert row(counter) == CollectiveRow(
        operation="all_reduce", axis="data_parallel", group_size=4, calls=2, payload=64, wire=96.0
    )


def test_payload_is_the_whole_tensor(mesh: DeviceMesh) -> None:
    group = mesh.get_group("data_parallel")
    part, whole = torch.ones(3), torch.ones(12)
    parts = [torch.ones(3) for _ in range(4)]
    with CollectiveCounter(mesh) as counter:
        dist.all_gather(parts, part, group=group)
        dist.reduce_scatter(part, parts, group=group)
        dist.all_to_all_single(whole, torch.ones(12), group=group)
        dist.broadcast(whole, group=group, group_src=0)
    assert [(r.operation, r.payload, r.wire) for r in counter.table.rows] == [
        ("all_gather", 48, 36.0),
        ("reduce_scatter", 48, 36.0),
        ("all_to_all", 48, 36.0),
        ("broadcast", 48, 48.0),
    ]


def test_functional_collectives_count_once(mesh: DeviceMesh) -> None:
    group = mesh.get_group("tensor_parallel")
    value = torch.ones(4, requires_grad=True)
    with CollectiveCounter(mesh) as counter:
        functional.all_reduce(torch.ones(4), "sum", group).sum()
        functional.all_to_all_single_autograd(value, None, None, group).sum().backward()
    assert counter.table.calls("all_reduce", "tensor_parallel") == 1
    assert counter.table.calls("all_to_all") == 2
    assert counter.table.payload("all_to_all") == 32


def test_dtensors_are_counted_by_what_they_cause(mesh: DeviceMesh) -> None:
    value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Replicate()], run_check=False)
    with CollectiveCounter(mesh) as counter:
        value.redistribute(placements=[Replicate(), Replicate()])
    assert row(counter).axis == "data_parallel"
    assert row(counter).operation == "all_gather"
    assert row(counter).payload == 96


def test_fake_tensors_count_alike(mesh: DeviceMesh) -> None:
    with FakeTensorMode(), CollectiveCounter(mesh) as counter:
        dist.all_reduce(torch.ones(1000, 1000, dtype=torch.float64), group=mesh.get_group("tensor_parallel"))
    assert row(counter).payload == 8_000_000
    assert row(counter).wire == 8_000_000


def test_groups_without_a_name(mesh: DeviceMesh) -> None:
    pair = dist.new_group([1, 5])
    with CollectiveCounter(mesh) as counter:
        dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    assert [r.axis for r in counter.table.rows] == ["ranks 1,5", "world"]
    with CollectiveCounter({"pair": pair}) as counter:
        dist.send(torch.ones(2), 5, group=pair)
        dist.recv(torch.ones(2), 5, group=pair)
    assert [(r.operation, r.axis, r.wire) for r in counter.table.rows] == [("send", "pair", 8), ("receive", "pair", 8)]


def test_flattened_axes_have_their_name() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data_replicate", "data_shard", "tensor_parallel"))
        mesh["data_replicate", "data_shard"]._flatten("data_parallel")
        with CollectiveCounter(mesh) as counter:
            for name in ("data_shard", "data_parallel"):
                dist.all_reduce(torch.ones(1), group=mesh.get_group(name))
        assert [(r.axis, r.group_size) for r in counter.table.rows] == [("data_shard", 2), ("data_parallel", 4)]
    finally:
        dist.destroy_process_group()


def test_a_group_of_one_sends_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with CollectiveCounter({"alone": dist.group.WORLD}) as counter:
            dist.all_reduce(torch.ones(4))
        assert (row(counter).axis, row(counter).payload, row(counter).wire) == ("alone", 16, 0)
    finally:
        dist.destroy_process_group()


def test_reset_and_text(mesh: DeviceMesh) -> None:
    with CollectiveCounter(mesh) as counter:
        dist.all_reduce(torch.ones(256), group=mesh.get_group("data_parallel"))
        assert str(counter.table).splitlines() == [
            "operation       axis                ranks   calls      payload    sent/rank",
            "all_reduce      data_parallel           4       1     1.00 KiB     1.50 KiB",
        ]
        counter.reset()
    assert counter.table.rows == ()
    assert counter.table.wire() == 0


def test_every_collective_of_this_torch_is_known() -> None:
    names = {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
        "receive", "send_receive", None,
    }  # fmt: skip
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_dtensor") and "." not in rest:
            packet = getattr(getattr(torch.ops, namespace), rest)
            found[name] = operation_of(getattr(packet, packet.overloads()[0]))
    assert len(found) > 30
    assert {name: operation for name, operation in found.items() if operation not in names} == {}
