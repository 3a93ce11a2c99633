"""A module whose parameters are cut over the tensor axis trains as on one device, at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.gradients import clip_by_norm
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.plan import plan_data
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.state import TensorState
from lightning_3d.shards.group import ProcessShardGroup
from tests.spmd.cut_net import CLIP, LAYOUTS, MICROBATCHES, PARTIAL, CutNet, batches, in_order, train_whole
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd
CPU = torch.device("cpu")


def applied(module: nn.Module, spec: MeshSpec, mesh: DeviceMesh, zero: int) -> tuple[TensorState, DataEngine]:
    table, stacks = parameter_table(module), find_stacks(module)
    axis = mesh["tensor_parallel"]
    state = apply_tensor(module, LAYOUTS, axis, ProcessShardGroup(axis.get_group()), device=CPU, partial=PARTIAL)
    plan = plan_data(table, stacks, zero_stage=zero, data_size=spec.data, tensor_size=spec.tensor)
    engine = apply_data(module, plan, data_mesh(mesh) if zero else data_axis_mesh(mesh))
    state.settle()
    return state, engine


def train(rank: int, world: int, sizes: dict[str, int], zero: int, options: dict[str, Any]) -> dict[str, Any]:
    spec = MeshSpec(pipeline=1, **sizes)
    mesh = build_device_mesh(spec, "cpu")
    net = CutNet().double()
    state, engine = applied(net, spec, mesh, zero)
    assert net.head.weight is net.embedding.weight
    assert net.embedding.weight.no_decay
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    found: dict[str, Any] = {"losses": [], "norms": [], "engine": type(engine).__name__}
    own = spec.coordinate(rank).data
    for step, microbatches in enumerate(batches(spec.data)):
        for index, parts in enumerate(microbatches):
            engine.before_microbatch(last=index == MICROBATCHES - 1)
            with state.activity:
                loss = engine.run(net.loss, parts[own]) / MICROBATCHES
                loss.backward()
            found["losses"].append(loss.item())
        engine.gradients_complete()
        state.complete_partial_gradients()
        if step == 0:
            found["gradients"] = {
                name: in_order(name, p.grad, spec.tensor) for name, p in net.named_parameters() if p.grad is not None
            }
        found["norms"].append(float(clip_by_norm(list(net.parameters()), CLIP, group=torch.distributed.group.WORLD)))
        optimizer.step()
        optimizer.zero_grad()
    engine.rest()
    with torch.no_grad():
        parameters = {name: in_order(name, parameter, spec.tensor) for name, parameter in net.named_parameters()}
    placements = {name: str(parameter.placements) for name, parameter in net.named_parameters()}
    return found | {"parameters": parameters, "placements": placements}


def compare(results: list[dict[str, Any]], sizes: dict[str, int], **options: Any) -> None:
    data, tensor = sizes["data"], sizes["tensor"]
    expected = train_whole(data, **options)
    for at in range(len(expected["losses"])):
        mean = sum(result["losses"][at] for result in results) / (data * tensor)
        assert mean == pytest.approx(expected["losses"][at], rel=1e-13)
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        for kind, tolerance in (("gradients", 1e-12), ("parameters", 1e-10)):
            assert result[kind].keys() == expected[kind].keys()
            for name, value in expected[kind].items():
                torch.testing.assert_close(
                    result[kind][name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
                )


@pytest.mark.parametrize(
    ("sizes", "zero", "options"),
    [
        ({"data": 1, "tensor": 2}, 0, {}),
        ({"data": 1, "tensor": 2}, 3, {"foreach": True}),
        ({"data": 2, "tensor": 2}, 0, {}),
        ({"data": 2, "tensor": 2}, 1, {"foreach": True}),
        ({"data": 2, "tensor": 2}, 2, {}),
        ({"data": 2, "tensor": 2}, 3, {"foreach": False}),
        ({"data": 2, "tensor": 2}, 1, {"fused": True}),
        ({"data": 4, "tensor": 2, "data_replicate": 2}, 0, {}),
        ({"data": 4, "tensor": 2, "data_replicate": 2}, 2, {}),
    ],
    ids=str,
)
def test_training_equals_one_device(sizes: dict[str, int], zero: int, options: dict[str, Any]) -> None:
    results = run_spmd(train, sizes["data"] * sizes["tensor"], sizes, zero, options)
    compare(results, sizes, **options)
