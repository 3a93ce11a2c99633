from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.counters import CollectiveCounter
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.cost import tensor_traffic
from lightning_3d.shards.group import ProcessShardGroup
from tests.spmd.cut_net import HEADS, LAYOUTS, MICROBATCHES, PARTIAL, WIDTH, CutNet, batches
from tests.spmd.sums import dense_block, vocabulary


def test_a_step_sends_what_was_predicted(tensor_mesh: DeviceMesh) -> None:
    net = CutNet()
    group = ProcessShardGroup(tensor_mesh.get_group())
    state = apply_tensor(net, LAYOUTS, tensor_mesh, group, device=torch.device("cpu"), partial=PARTIAL)
    rows = 2 * 6
    hidden = rows * WIDTH * 4
    gradients = len(PARTIAL) * WIDTH // HEADS * 4
    expected = tensor_traffic(
        [dense_block(hidden), dense_block(hidden), *vocabulary(hidden, rows)], size=2, microbatches=MICROBATCHES
    )
    # Partial gradients are summed once.
    once = TrafficRow(operation="all_reduce", axis="tensor_parallel", group_size=2, calls=1, payload=gradients)
    expected += Traffic(rows=(once,))
    with CollectiveCounter(tensor_mesh) as counter:
        for parts in batches(1)[0]:
            with state.activity:
                net.loss(parts[0]).backward()
        state.complete_partial_gradients()
    assert [str(row) for row in counter.table.rows] == [str(row) for row in expected.rows]


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    sums = [dense_block(100), *vocabulary(100, 5)]
    plain = tensor_traffic(sums, size=4, microbatches=3)
    cut = tensor_traffic(sums, size=4, microbatches=3, sequence=True)
    assert {row.operation: row.calls for row in plain.rows} == {"all_reduce": 3 * (4 + 2 + 2)}
    assert {row.operation: row.calls for row in cut.rows} == {
        "reduce_scatter": 3 * 6,
        "all_gather": 3 * 6,
        "all_reduce": 3 * 2,
    }
    assert plain.wire == cut.wire


def test_recomputing_costs_one_more_sum() -> None:
    assert dense_block(8, recomputed=True).calls == dense_block(8).calls + 1


def test_one_rank_sends_nothing() -> None:
    assert tensor_traffic([dense_block(8)], size=1, microbatches=2).rows == ()
