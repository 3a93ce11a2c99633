"""Losses over classes that are cut, on gloo processes: equal to one device, and how little they exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.counters import CollectiveCounter
from lightning_3d.shards.along import amax, argmax, largest, mean, pick, topk, total
from lightning_3d.shards.group import ProcessShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.loss import cross_entropy, nll_loss
from lightning_3d.shards.softmax import log_softmax, logsumexp, softmax
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

ROWS, CLASSES = 24, 64


def targets() -> Tensor:
    return torch.arange(ROWS) * 5 % CLASSES


def logits() -> Tensor:
    whole = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole[:, 7] = whole[:, 50]  # equal ones on two ranks
    return whole


def loss_and_gradient(rank: int, world: int, smoothing: float) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    assert dist.group.WORLD is not None
    group = ProcessShardGroup(dist.group.WORLD)
    local = take(logits(), 1, (CLASSES,), rank, world).clone().requires_grad_()
    counts = []
    with CollectiveCounter({"tensor": dist.group.WORLD}) as counter:
        loss = cross_entropy(local, targets(), group, classes=CLASSES, label_smoothing=smoothing)
        counts.append((counter.table.calls(), counter.table.payload()))
        loss.backward()
        counts.append((counter.table.calls(), counter.table.payload()))
    assert local.grad is not None
    return loss.detach(), local.grad, counts


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_exchanges_a_max_and_a_sum_of_rows(smoothing: float) -> None:
    one = logits().requires_grad_()
    expected = F.cross_entropy(one, targets(), label_smoothing=smoothing)
    expected.backward()
    assert one.grad is not None
    results = run_spmd(loss_and_gradient, 2, smoothing)
    for loss, _, counts in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        # The largest logit of each row; then the sums of powers, of targets and, smoothed, of all classes.
        payload = (1 + (3 if smoothing else 2)) * ROWS * 8
        assert counts == [(2, payload), (2, payload)]
    torch.testing.assert_close(torch.cat([part for _, part, _ in results], 1), one.grad, rtol=1e-12, atol=1e-12)


def calls(rank: int, world: int) -> dict[str, tuple[int, int, Tensor]]:
    assert dist.group.WORLD is not None
    group = ProcessShardGroup(dist.group.WORLD)
    local = take(logits(), 1, (CLASSES,), rank, world).clone().requires_grad_()
    index = targets()[:, None]
    operations: dict[str, Callable[[], Tensor]] = {
        "softmax": lambda: softmax(local, group, 1),
        "log_softmax": lambda: log_softmax(local, group, 1),
        "logsumexp": lambda: logsumexp(local, group, 1),
        "nll_loss": lambda: nll_loss(local, targets(), group, classes=CLASSES),
        "pick": lambda: pick(local, group, 1, index, CLASSES),
        "largest": lambda: largest(local, group, 1, CLASSES).values,
        "argmax": lambda: argmax(local, group, 1, CLASSES),
        "topk": lambda: topk(local, group, 5, 1, CLASSES).values,
        "amax": lambda: amax(local, group, 1),
        "total": lambda: total(local, group, 1),
        "mean": lambda: mean(local, group, 1, CLASSES),
    }
    counted = {}
    for name, operation in operations.items():
        with CollectiveCounter({"tensor": dist.group.WORLD}) as counter:
            result = operation()
            forward = counter.table.calls()
            if result.requires_grad:
                result.sum().backward()
        counted[name] = (forward, counter.table.calls() - forward, result.detach())
    return counted


def test_collectives_of_each_operation_in_both_directions() -> None:
    whole = logits()
    expected: dict[str, tuple[int, int, Tensor]] = {
        "softmax": (2, 1, whole.softmax(1)),
        "log_softmax": (2, 1, whole.log_softmax(1)),
        "logsumexp": (2, 0, whole.logsumexp(1)),
        "nll_loss": (1, 0, F.nll_loss(whole, targets())),
        "pick": (1, 0, whole.gather(1, targets()[:, None])),
        "largest": (1, 0, whole.max(1).values),
        "argmax": (1, 0, whole.argmax(1)),
        "topk": (1, 0, whole.topk(5, 1).values),
        "amax": (1, 1, whole.amax(1)),
        "total": (1, 0, whole.sum(1)),
        "mean": (1, 0, whole.mean(1)),
    }
    first, second = run_spmd(calls, 2)
    for name, (forward, backward, result) in expected.items():
        found = torch.cat([first[name][2], second[name][2]], 1) if "softmax" in name else first[name][2]
        torch.testing.assert_close(found, result, rtol=1e-12, atol=1e-12)
        assert first[name][:2] == second[name][:2] == (forward, backward), name
