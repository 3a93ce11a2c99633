"""Recorded initial values are the same, to the bit, however the parameters are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.record import InitRecorder
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.plan import plan_data
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.shards.group import ProcessShardGroup
from tests.spmd.cut_net import LAYOUTS, CutNet, batches, in_order
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd
CPU = torch.device("cpu")


def initial_weights(rank: int, world: int, sizes: dict[str, int], zero: int) -> dict[str, Tensor]:
    spec = MeshSpec(pipeline=1, **sizes)
    mesh = build_device_mesh(spec, "cpu")
    recorder = InitRecorder(7)
    with recorder:
        net = CutNet(seed=rank)
    tape = recorder.tape(net)
    assert net.embedding.weight.is_meta
    axis = mesh["tensor_parallel"]
    table, stacks = parameter_table(net), find_stacks(net)
    state = apply_tensor(net, LAYOUTS, axis, ProcessShardGroup(axis.get_group()), device=CPU)
    plan = plan_data(table, stacks, zero_stage=zero, data_size=spec.data, tensor_size=spec.tensor)
    engine = apply_data(net, plan, data_mesh(mesh) if zero else data_axis_mesh(mesh))
    materialise(net, tape, device=CPU, layouts=LAYOUTS)
    assert net.head.weight is net.embedding.weight
    assert net.embedding.weight.no_decay
    assert not net.blocks[0].mlp.down.bias.requires_grad
    with torch.no_grad():
        weights = {name: in_order(name, parameter, spec.tensor) for name, parameter in net.named_parameters()}
    with state.activity:
        engine.run(net.loss, batches(1)[0][0][0]).backward()
    return weights


def test_initial_weights_are_the_same_on_every_mesh() -> None:
    (reference,) = run_spmd(initial_weights, 1, {"data": 1, "tensor": 1}, 0)
    for data, tensor, zero in [(1, 2, 0), (2, 2, 0), (2, 2, 3)]:
        for weights in run_spmd(initial_weights, data * tensor, {"data": data, "tensor": tensor}, zero):
            assert weights.keys() == reference.keys()
            assert [name for name in reference if not torch.equal(weights[name], reference[name])] == []
