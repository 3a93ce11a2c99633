"""Initial weights and running statistics on real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.initial.broadcast import BufferBroadcast, broadcast_module
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.record import InitRecorder
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd


def broadcast_states(rank: int, world: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 5, dtype=torch.bfloat16), nn.BatchNorm1d(5))
    module[1].running_mean.fill_(rank)
    module.register_buffer("mask", torch.tensor([rank == 0, True, rank == 1]))
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[min(rank, 1)]
    broadcast_module(module, group)
    states = [{name: tensor.clone() for name, tensor in module.state_dict().items()}]
    module[1].running_var.fill_(10 + rank)
    module[1].num_batches_tracked.fill_(rank)
    BufferBroadcast(module, group)()
    return [*states, dict(module.state_dict())]


def test_first_rank_of_the_group_wins() -> None:
    alone, first, second = run_spmd(broadcast_states, 3)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(alone[0]["0.weight"], first[0]["0.weight"])
    assert first[0]["1.running_mean"].tolist() == [1.0] * 5
    assert first[0]["mask"].tolist() == [False, True, True]
    assert second[1]["1.running_var"].tolist() == [11.0] * 5
    assert second[1]["1.num_batches_tracked"].item() == 1


def whole_weights(rank: int, world: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    recorder = InitRecorder(7)
    with recorder:
        module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    tape = recorder.tape(module)
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_replicate", "data_shard")[-len(shape) :])
        fully_shard(module, mesh=mesh)
    materialise(module, tape, device=torch.device("cpu"))
    module(torch.ones(2, 5)).sum().backward()
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def test_initial_weights_are_the_same_on_every_mesh() -> None:
    (reference,) = run_spmd(whole_weights, 1, ())
    for world, shape in [(3, (3,)), (4, (2, 2))]:
        for weights in run_spmd(whole_weights, world, shape):
            assert all(torch.equal(weights[name], reference[name]) for name in reference)
