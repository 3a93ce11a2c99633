"""Batch normalisation over all data ranks: outputs, gradients and running statistics of one batch on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.graph.calls import plain_calls
from lightning_3d.parallel.data.normalisation import normalise_over_ranks
from tests.spmd.pool import run_spmd

# Samples of each rank.
COUNTS = (3, 1)
KINDS: dict[str, Any] = {
    "of vectors": lambda: nn.BatchNorm1d(4),
    "of images, plain": lambda: nn.BatchNorm2d(4, affine=False, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
}


def inputs(module: nn.Module) -> Tensor:
    shape = (sum(COUNTS), 4, 2, 3) if isinstance(module, nn.BatchNorm2d) else (sum(COUNTS), 4)
    # Far from zero, where squares would cancel.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1000


def passed(module: nn.Module, values: Tensor) -> list[Tensor]:
    values = values.clone().requires_grad_()
    result = module(values)
    (result * torch.linspace(0, 1, result[0].numel()).view(result[0].shape)).square().sum().backward()
    assert values.grad is not None
    return [result.detach(), values.grad]


def compared(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for make in KINDS.values():
        mine = make()
        one = copy.deepcopy(mine).double()
        normalise_over_ranks(mine, group)
        whole = inputs(one)
        for _ in range(2):
            expected = passed(one, whole.double())
            found = passed(mine, whole.split(COUNTS)[rank])
            for value, of_all in zip(found, expected, strict=True):
                assert value.dtype == torch.float32
                torch.testing.assert_close(value.double(), of_all.split(COUNTS)[rank], rtol=1e-3, atol=1e-3)
        for name, buffer in mine.named_buffers():
            torch.testing.assert_close(buffer.double(), one.get_buffer(name).double(), rtol=1e-4, atol=1e-4)
        # In evaluation, and when nobody trains it, it is the user's own.
        for module in (mine, one):
            module.eval() if module.track_running_stats else plain_calls(module)
        if mine.track_running_stats:
            torch.testing.assert_close(mine(whole[:1]).double(), one(whole[:1].double()), rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(mine(whole), make()(whole))


@pytest.mark.spmd
def test_ranks_normalise_together() -> None:
    run_spmd(compared, 2)
