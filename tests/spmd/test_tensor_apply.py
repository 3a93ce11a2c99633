"""A module whose parameters are cut over the tensor axis trains as on one device, at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.gradients import clip_by_norm
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.calls import around_calls
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.plan import plan_data
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.doors import BlockDoor
from lightning_3d.parallel.tensor.reading.leaves import slots_of
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.shards import nodes
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.group import ProcessShardGroup, ShardGroup
from tests.marks import more
from tests.spmd.cut_net import CLIP, LAYOUTS, MICROBATCHES, PARTIAL, CutNet, batches, in_order, train_whole
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd
CPU = torch.device("cpu")


def applied(
    module: nn.Module, spec: MeshSpec, mesh: DeviceMesh, zero: int, policy: MixedPrecisionPolicy | None = None
) -> tuple[TensorState, DataEngine]:
    table, stacks = parameter_table(module), find_stacks(module)
    axis = mesh["tensor_parallel"]
    state = apply_tensor(module, LAYOUTS, axis, ProcessShardGroup(axis.get_group()), device=CPU, partial=PARTIAL)
    plan = plan_data(table, stacks, zero_stage=zero, data_size=spec.data, tensor_size=spec.tensor)
    engine = apply_data(module, plan, data_mesh(mesh) if zero else data_axis_mesh(mesh), policy=policy)
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


class SequenceBlock(nn.Module):
    """Takes and gives a sequence, beside others in a dict, and has a parameter that it may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert x.shape == others["first"].shape == (2, 6, 4)
        return x + torch.tanh(self.linear(self.norm(x))), {"first": others["first"] * 2}


class SequenceNet(nn.Module):
    """Blocks whose arguments and results are cut along the sequence on a mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(SequenceBlock() for _ in range(2))

    def loss(self, inputs: Tensor, group: ShardGroup | None = None) -> Tensor:
        x = self.inner(inputs)
        if group is not None:
            x = Shard(nodes.part(x, group, 1, (6,)), 1, (6,), group)
        others = {"first": x}
        for block in self.blocks:
            x, others = block(x, others)
        both = x + others["first"]
        return (both if group is None else gathered(both)).pow(2).mean()


def train_on_sequences(rank: int, world: int, zero: int, later: bool) -> dict[str, Tensor]:
    spec = MeshSpec(data=2, pipeline=1, tensor=2)
    mesh = build_device_mesh(spec, "cpu")
    net = SequenceNet().double()
    used_on_parts = [name for name, _ in net.named_parameters() if name.startswith("blocks")]
    table, stacks, axis = parameter_table(net), find_stacks(net), mesh["tensor_parallel"]
    group = ProcessShardGroup(axis.get_group())
    state = apply_tensor(net, {}, axis, group, device=CPU, partial=used_on_parts if later else ())
    plan = plan_data(table, stacks, zero_stage=zero, data_size=2, tensor_size=2)
    engine = apply_data(net, plan, data_mesh(mesh) if zero else data_axis_mesh(mesh))
    state.settle()
    for block in net.blocks:
        around_calls(block, BlockDoor(block).around)
    inputs = torch.randn(2, 2, 6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        engine.before_microbatch(last=True)
        with state.activity:
            engine.run(net.loss, inputs[spec.coordinate(rank).data], group).backward()
        engine.gradients_complete()
        state.complete_partial_gradients()
        optimizer.step()
        optimizer.zero_grad()
    engine.rest()
    with torch.no_grad():
        return {name: parameter.full_tensor().clone() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(("zero", "later"), [(0, True), (1, False), (2, True), (3, True)])
def test_nothing_is_lost_where_shards_cross_the_hooks_of_blocks(zero: int, later: bool) -> None:
    net = SequenceNet().double()
    inputs = torch.randn(2, 2, 6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        ((net.loss(inputs[0]) + net.loss(inputs[1])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in run_spmd(train_on_sequences, 4, zero, later):
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-11, atol=1e-11)


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
        more({"data": 2, "tensor": 2}, 0, {}),
        ({"data": 2, "tensor": 2}, 1, {"foreach": True}),
        more({"data": 2, "tensor": 2}, 2, {}),
        ({"data": 2, "tensor": 2}, 3, {"foreach": False}),
        ({"data": 2, "tensor": 2}, 1, {"fused": True}),
        more({"data": 4, "tensor": 2, "data_replicate": 2}, 0, {}),
        ({"data": 4, "tensor": 2, "data_replicate": 2}, 2, {}),
    ],
    ids=str,
)
def test_training_equals_one_device(sizes: dict[str, int], zero: int, options: dict[str, Any]) -> None:
    results = run_spmd(train, sizes["data"] * sizes["tensor"], sizes, zero, options)
    compare(results, sizes, **options)


def waiting_gradients(rank: int, world: int, zero: int) -> set[str]:
    """Names of the parameters whose whole gradients wait between two micro-batches."""
    spec = MeshSpec(data=2, pipeline=1, tensor=2)
    net = CutNet().double()
    state, engine = applied(net, spec, build_device_mesh(spec, "cpu"), zero)
    engine.before_microbatch(last=False)
    with state.activity:
        engine.run(net.loss, batches(2)[0][0][0]).backward()
    leaves = {
        f"{prefix}.{name}": slot.leaf
        for prefix, child in net.named_modules()
        for name, slot in slots_of(child).items()
        if slot.leaf is not None
    }
    assert len(leaves) == len(list(net.named_parameters(remove_duplicate=False)))
    assert all(leaf.tensor.grad is None for leaf in leaves.values())
    return {name for name, leaf in leaves.items() if leaf.parameter.grad is not None and leaf.parameter.dim()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_whole_gradients_wait_at_stage_1_only(zero: int) -> None:
    for names in run_spmd(waiting_gradients, 4, zero):
        assert bool(names) is (zero == 1)


def gradients_in_bf16(rank: int, world: int, tensor: int) -> dict[str, Tensor]:
    spec = MeshSpec(data=world // tensor, pipeline=1, tensor=tensor)
    mesh, net = build_device_mesh(spec, "cpu"), CutNet()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    state, engine = applied(net, spec, mesh, 3, policy=policy)
    seen: list[torch.dtype] = []
    net.blocks[0].mlp.register_forward_hook(lambda mlp, args, output: seen.append(mlp.gate_up.dtype))
    for index in range(MICROBATCHES):
        engine.before_microbatch(last=index == MICROBATCHES - 1)
        with state.activity:
            engine.run(net.loss, batches(2)[0][index][0]).backward()
    engine.gradients_complete()
    state.complete_partial_gradients()
    assert seen == [torch.bfloat16] * MICROBATCHES
    found = {name: in_order(name, p.grad, tensor) for name, p in net.named_parameters() if p.grad is not None}
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    return found


def test_gathered_parameters_may_have_another_dtype() -> None:
    (expected, *_), (found, *_) = run_spmd(gradients_in_bf16, 2, 1), run_spmd(gradients_in_bf16, 4, 2)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.02)
