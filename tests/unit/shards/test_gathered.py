"""What has no rule: the gathered whole, what is written to it or to views of it, and what is told."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.window import Window
from tests.unit.shards.operations import check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

WRITES: dict[str, Callable[[Tensor], object]] = {
    "a position": lambda y: y[1].zero_(),
    "a slice": lambda y: y[1:3].mul_(2),
    "by an operator": lambda y: y[1].__iadd__(1),
    "a view of a view": lambda y: y[1:3].view(-1)[2:5].fill_(0.5),
    "the diagonal": lambda y: y.diagonal().add_(y.detach().sum()),
    "positions": lambda y: y[1:].index_fill_(0, torch.tensor([0]), 0.25),
    "an item of a view": lambda y: y[1:].__setitem__((0, 1), 0.125),
    "by the function of another tensor": lambda y: y[0].copy_(y[3]),
    "by arithmetic": lambda y: y.__setitem__(1, y[1] * 2),
    "no view": lambda y: y.index_add_(0, torch.tensor([1]), torch.ones(1, 4, dtype=y.dtype)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_the_shard(name: str) -> None:
    def operation(x: Tensor) -> Tensor:
        y = x * 1
        before = y.reshape(4, 4)
        WRITES[name](y)
        return before * y

    check(operation, operand(4, 4, cut=0), size=2, on_shards=False)


def test_views_that_autograd_forbids_to_write_stay_forbidden() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        x = Shard(torch.ones(2, 2, requires_grad=True), 0, (4,), group)
        with pytest.raises(RuntimeError, match="returns multiple views"):
            (x * 1).unbind()[0].zero_()

    run_threads(2, on_rank)


def test_windows_are_plain_in_all_else() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        x = Shard(torch.arange(4.0).view(2, 2) + 4 * group.rank, 0, (4,), group)
        row = x[2]
        assert isinstance(row, Window)
        assert row.tolist() == [4.0, 5.0]
        assert type(row * 2) is Tensor
        assert (x * row)._local.shape == (2, 2)
        assert type(torch.stack([row, row])) is Tensor
        assert type(copy.deepcopy(row)) is Tensor
        assert type(pickle.loads(pickle.dumps(row))) is Tensor
        with torch.inference_mode():
            x[2].zero_()
        assert x.tolist()[2] == [0.0, 0.0]

    run_threads(2, on_rank)


def test_a_gather_is_told_once_for_its_place(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        if group.rank == 0:
            caplog.set_level(logging.INFO, logger="lightning_3d")
        x = Shard(torch.ones(2, 2), 0, (4,), group)
        for _ in range(3):
            x.flip(0)
        torch.linalg.matrix_norm(x)

    run_threads(2, on_rank)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert sum("flip gathers 32 B at each call, at" in line and "test_gathered.py:" in line for line in told) == 2
    assert any(line.endswith("there is no rule for it") for line in told)


def test_kernels_are_called_on_the_whole() -> None:
    check(lambda x: torch.ops.aten.mul(x, 2), operand(4, 2, cut=0), size=2, on_shards=False)
