"""Gradients of parameters on several pipeline ranks, in all forms that they have there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_3d.counters import CollectiveCounter
from lightning_3d.gradients import PipelineShare, clip_by_norm
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.shared import SharedGradients
from tests.spmd.pool import SpmdError, run_spmd

pytestmark = pytest.mark.spmd

CPU = torch.device("cpu")
# The pipeline ranks that hold a parameter, and those of them that have a gradient for it.
THREE = {
    "ends": ((0, 2), (0, 2)),
    "half": ((0, 1, 2), (1,)),
    "never": ((0, 2), ()),
    "small": ((0, 2), (2,)),
    "begin": ((0, 1), (0, 1)),
}


def value(name: str, rank: int) -> Tensor:
    size = 2 if name == "small" else 3
    return torch.arange(size, dtype=torch.float64) + 10 * rank + len(name)


def sum_plain(rank: int, world: int) -> dict[str, Any]:
    mesh = build_device_mesh(MeshSpec(data=2, pipeline=3, tensor=1), "cpu")
    place = mesh.get_local_rank("pipeline_parallel")
    made = {name: nn.Parameter(torch.zeros_like(value(name, 0))) for name in THREE}
    for name, (_, users) in THREE.items():
        if place in users:
            made[name].grad = value(name, place)
    shared = SharedGradients(made, {name: holders for name, (holders, _) in THREE.items()}, mesh, device=CPU)
    with CollectiveCounter(mesh) as counter:
        shared.sum()
    own = {name: made[name].grad for name, (holders, _) in THREE.items() if place in holders}
    share = PipelineShare(ranks=3, holders=shared.holders, device=CPU)
    norm = clip_by_norm([made[name] for name in own], math.inf, group=dist.group.WORLD, share=share)
    return {"own": own, "calls": counter.table.calls("all_reduce"), "norm": float(norm)}


def test_each_holder_has_the_sum() -> None:
    sums = {
        name: torch.stack([value(name, user) for user in users]).sum(0) for name, (_, users) in THREE.items() if users
    }
    flat = torch.cat(list(sums.values()))
    for rank, found in enumerate(run_spmd(sum_plain, 6)):
        assert set(found["own"]) == {name for name, (holders, _) in THREE.items() if rank % 3 in holders}
        for name, gradient in found["own"].items():
            assert (gradient is None) is (name == "never")
            assert gradient is None or torch.equal(gradient, sums[name])
        # Which ones have a gradient, and all of them together, for each set of holders.
        assert found["calls"] == 2 * {0: 3, 1: 2, 2: 2}[rank % 3]
        assert found["norm"] == pytest.approx(float(flat.norm()))


def cut(mesh: DeviceMesh, dim: int) -> DTensor:
    own = torch.zeros(2, 4, dtype=torch.float64)
    return DTensor.from_local(own, mesh["data_parallel", "tensor_parallel"], [Shard(0), Shard(dim)], run_check=False)


def sum_parts(rank: int, world: int, alike: bool) -> Any:
    mesh = build_device_mesh(MeshSpec(data=2, pipeline=2, tensor=2), "cpu")
    place = mesh.get_local_rank("pipeline_parallel")
    form = cut(mesh, 1 if alike else place)
    parameter = nn.Parameter(form)
    if place == 0:
        own = torch.full((4, 2), float(rank), dtype=torch.float64).T  # not in one piece
        parameter.grad = DTensor.from_local(
            own, form.device_mesh, form.placements, run_check=False, shape=form.shape, stride=form.stride()
        )
    shared = SharedGradients({"tied": parameter}, {"tied": (0, 1)}, mesh, device=CPU)
    shared.sum()
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()[:, :2].tolist(), str(parameter.grad.placements)


def test_parts_of_data_and_tensor_ranks_are_summed_as_they_lie() -> None:
    for rank, (own, placements) in enumerate(run_spmd(sum_parts, 8, True)):
        # Ranks lie data x pipeline x tensor; the first pipeline rank of the same parts has the gradient.
        holder = rank & ~2
        assert own == [[float(holder)] * 2] * 2
        assert "Shard(dim=0)" in placements
        assert "Shard(dim=1)" in placements


def test_holders_that_cut_differently_are_found() -> None:
    with pytest.raises(SpmdError, match="cut them alike"):
        run_spmd(sum_parts, 8, False)
