from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.gradients import (
    PipelineShare,
    clip_by_norm,
    clip_by_value,
    local_gradients,
    scale_gradients,
)


def parameters() -> list[Tensor]:
    made = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)),
        nn.Parameter(torch.ones(1)),
    ]
    made[0].grad = torch.tensor([3.0, 0.0, -4.0])
    made[1].grad = torch.full((2, 2), 6.0, dtype=torch.float64)
    return made


def test_norm_is_that_of_one_vector() -> None:
    flat = torch.cat([gradient.double().flatten() for gradient in local_gradients(parameters())])
    assert float(clip_by_norm(parameters(), math.inf, group=None)) == pytest.approx(float(flat.norm()))


def test_parameters_without_gradients_count_nothing() -> None:
    assert len(local_gradients(parameters())) == 2
    assert float(clip_by_norm([nn.Parameter(torch.ones(2))], 1.0, group=None)) == 0


@pytest.mark.parametrize("limit", [1.0, 100.0])
def test_clipping_by_norm_is_torchs(limit: float) -> None:
    ours, theirs = parameters(), parameters()
    assert float(clip_by_norm(ours, limit, group=None)) == float(nn.utils.clip_grad_norm_(theirs, limit))
    for mine, other in zip(local_gradients(ours), local_gradients(theirs), strict=True):
        assert torch.equal(mine, other)


def test_clipping_by_value_and_scaling() -> None:
    clipped, scaled = parameters(), parameters()
    clip_by_value(clipped, 3.5)
    assert [gradient.tolist() for gradient in local_gradients(clipped)] == [[3.0, 0.0, -3.5], [[3.5, 3.5], [3.5, 3.5]]]
    scale_gradients(scaled, torch.tensor(0.5, dtype=torch.float64))
    first, second = local_gradients(scaled)
    assert (first.tolist(), first.dtype, second[0, 0].item()) == ([1.5, 0.0, -2.0], torch.float32, 3.0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_norm_of_parts(mesh: DeviceMesh) -> None:
    cut = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
    cut.grad = DTensor.from_local(torch.tensor([1.0, -2.0, 0.0, 2.0]), mesh, [Shard(0)])
    whole = nn.Parameter(torch.zeros(1))
    whole.grad = torch.tensor([4.0])
    norm = clip_by_norm([cut, whole], math.inf, group=dist.group.WORLD)
    assert float(norm) == 5.0
    assert not isinstance(norm, DTensor)


def test_norm_over_parameters_of_different_meshes() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "tensor"))
        # The last number says on how many ranks each element lies.
        kinds = [
            (mesh["tensor"], [Replicate()], 8),
            (mesh["tensor"], [Shard(0)], 4),
            (mesh["shards", "tensor"], [Shard(0), Replicate()], 4),
            (mesh["shards", "tensor"], [_StridedShard(0, split_factor=2), Shard(0)], 2),
            (mesh, [Replicate(), _StridedShard(0, split_factor=2), Shard(0)], 2),
            (mesh, [Replicate(), Replicate(), Replicate()], 8),
        ]
        made = [nn.Parameter(torch.zeros(1))]
        made[0].grad = torch.tensor([2.0])
        expected = 2.0**2
        for own, placements, holders in kinds:
            cut = nn.Parameter(DTensor.from_local(torch.zeros(3), own, placements, run_check=False))
            cut.grad = DTensor.from_local(torch.tensor([1.0, -2.0, 3.0]), own, placements, run_check=False)
            made.append(cut)
            # All ranks of the fake world hold what this one does.
            expected += 8 / holders * sum(value**2 for value in (1.0, 2.0, 3.0))
        norm = clip_by_norm(made, math.inf, group=dist.group.WORLD)
        assert float(norm) == pytest.approx((expected / 8) ** 0.5)
    finally:
        dist.destroy_process_group()


def test_norm_over_stages_counts_shared_parameters_once() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=12)
    try:
        mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("data", "pipeline", "tensor"))
        made = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        for parameter in made:
            parameter.grad = torch.tensor([2.0])
        cut = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh["data"], [Shard(0)], run_check=False))
        cut.grad = DTensor.from_local(torch.tensor([3.0]), mesh["data"], [Shard(0)], run_check=False)
        share = PipelineShare(ranks=3, holders={made[1]: 2}, device=torch.device("cpu"))
        norm = clip_by_norm([*made, cut], math.inf, group=dist.group.WORLD, share=share)
        # The fake world adds nothing to what this rank counts: 1 of the 4 ranks that hold the first parameter, of the
        # 8 that hold the second, and of the 2 that hold each element of the last.
        assert float(norm) == pytest.approx((4 / 4 + 4 / 8 + 9 / 2) ** 0.5)
        # A rank without gradients takes part all the same, in the same dtype.
        nothing = clip_by_norm([], math.inf, group=dist.group.WORLD, share=share)
        assert (float(nothing), nothing.dtype, norm.dtype) == (0.0, torch.float64, torch.float64)
        assert float(clip_by_norm([nn.Parameter(torch.ones(1))], 1.0, group=dist.group.WORLD, share=share)) == 0.0
    finally:
        dist.destroy_process_group()
