"""One loss scale for all pipeline ranks, of which some have no loss and no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_3d import Mesh3DPrecision
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd


def scaled_steps(rank: int, world: int, overflow: bool) -> tuple[list[float], float]:
    precision = Mesh3DPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=4.0, growth_interval=1))
    precision.join_mesh("cpu", dist.group.WORLD, clipper=None)  # type: ignore[arg-type]
    scaler = precision.scaler
    assert scaler is not None
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    if rank == 0:
        loss = precision.scaled(parameter.sum())
        loss.backward()
    if rank == 1:
        # It has been sent the gradient of the scaled loss, and scales nothing itself.
        parameter.grad = torch.full((1,), float("inf") if overflow else 8.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return parameter.tolist(), scaler.get_scale()


def test_gradients_that_fit_are_unscaled_on_every_rank() -> None:
    assert run_spmd(scaled_steps, 3, False) == [([0.5], 8.0), ([0.0], 8.0), ([1.0], 8.0)]


def test_an_overflow_on_one_rank_is_one_for_all() -> None:
    assert run_spmd(scaled_steps, 3, True) == [([1.0], 2.0)] * 3
