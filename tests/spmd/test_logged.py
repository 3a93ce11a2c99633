"""Logged values meet by name: whatever each rank has logged, all of them end with the same, and none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from lightning_3d import Mesh3DPrecision
from lightning_3d.strategy.logging.gathering import gather_tensors
from lightning_3d.strategy.logging.named import NamedValues, Reduced, Share
from tests.spmd.fits import loader, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import Plain, classified

pytestmark = pytest.mark.spmd

BATCHES = classified(4, 8)

# ---- values by name ----


def named(world: int, *, data_size: int) -> NamedValues:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank() // (world // data_size)
    return NamedValues(group, torch.device("cpu"), data_rank=rank, data_size=data_size)


def plain(found: dict[str, Reduced]) -> dict[str, float]:
    return {name: float(reduced.value) for name, reduced in found.items()}


def alike(rank: int, world: int, data_size: int) -> dict[str, float]:
    position = rank // (world // data_size)
    shares = {
        "mean": Share.of("mean", position + 1.0, weight=position + 1),
        "sum": Share.of("sum", torch.tensor(position + 1.0)),
        "max": Share.of("max", position),
        "min": Share.of("min", position),
        "none": Share.of("mean", float("nan"), weight=0.0 if position else 1.0) if position else Share.of("mean", 3.0),
        "states": Share.of("states", 0.0),
    }
    many = {f"value {index}": Share.of("sum", float(index)) for index in range(70)}
    values = named(world, data_size=data_size)
    more = values.reduce(shares | many, lambda name: None)
    assert [more[name].value.item() for name in many] == [data_size * index for index in range(70)]
    found = values.reduce(shares, lambda name: None)
    assert found["states"].kind == "states"
    return plain(found)


@pytest.mark.parametrize("data_size", [2, 1])
def test_values_of_the_same_names(data_size: int) -> None:
    two = {"mean": 5 / 3, "sum": 3.0, "max": 1.0, "min": 0.0, "none": 3.0, "states": 0.0}
    one = {"mean": 1.0, "sum": 1.0, "max": 0.0, "min": 0.0, "none": 3.0, "states": 0.0}
    for found in run_spmd(alike, 2, data_size):
        assert found == pytest.approx(two if data_size == 2 else one)


def different(rank: int, world: int) -> list[tuple[list[str], dict[str, float], Any]]:
    values, found = named(world, data_size=world), []
    both = {"a": Share.of("mean", rank + 1.0), "b": Share.of("max", rank)}
    mine: list[dict[str, Share]] = [
        {"first": Share.of("sum", 1.0)} if rank == 0 else {},
        both if rank == 0 else dict(reversed(both.items())),
        {"b": both["b"]} if rank == 0 else both,
        {"a": Share.of("mean", 7.0, weight=0.0)} if rank else {},
    ]
    for shares in mine:
        reduced = values.reduce(shares, lambda name: f"{name} of {rank}")
        found.append((list(reduced), plain(reduced), next(iter(reduced.values())).about))
    return found


def test_values_of_different_names() -> None:
    first, second = run_spmd(different, 2)
    assert first == second
    assert first == [
        (["first"], {"first": 1.0}, "first of 0"),
        (["a", "b"], {"a": 1.5, "b": 1.0}, "a of 0"),
        (["b", "a"], {"b": 1.0, "a": 2.0}, "b of 0"),
        (["a"], {"a": 0.0}, "a of 1"),
    ]


# ---- states of metrics ----


def gathered(rank: int, world: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    mine = [
        torch.tensor(1.5 + rank, dtype=[torch.float32, torch.float64][rank]),
        torch.tensor([1, 2]) if rank else torch.tensor([]),
        torch.ones(2 + rank, 3, dtype=torch.bfloat16),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False]),
    ]
    return [[(each.tolist(), str(each.dtype)) for each in gather_tensors(tensor, group)] for tensor in mine]


def test_states_of_any_shape_and_dtype_are_gathered() -> None:
    first, second = run_spmd(gathered, 2)
    assert first == second
    ones = [1.0, 1.0, 1.0]
    assert first == [
        [(1.5, "torch.float64"), (2.5, "torch.float64")],
        [([], "torch.int64"), ([1, 2], "torch.int64")],
        [([ones, ones], "torch.bfloat16"), ([ones, ones, ones], "torch.bfloat16")],
        [([], "torch.int64")] * 2,
        [([True, False], "torch.bool")] * 2,
    ]


# ---- what a module logs ----


class OnSomeRanks(Plain):
    """Logs what few ranks log, also where Lightning would wait for all, and metrics that few have told anything."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.largest, self.mean = SumMetric(), MaxMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank, both = self.global_rank, {"on_step": True, "on_epoch": True, "sync_dist": True}
        if rank == batch_idx % 2:
            self.log("turns", rank + 1.0, batch_size=4, **both)
            self.log("turns_max", batch_idx, reduce_fx="max", **both)
            self.total(batch_idx)
            self.log("total", self.total, on_step=True, on_epoch=True)
        if rank == 1:
            self.largest.update(batch_idx)
            self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.mean(torch.full((4 - 2 * rank,), rank))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.log("late", 5.0, sync_dist=True)
        # A collective of the user's, while one rank alone has looked at what was logged.
        self.log("gathered", float(self.all_gather(torch.tensor(self.global_rank)).sum()))


class LooksOnOneRank(Callback):
    """Reads logged values on rank 0 alone, as progress bars do; then all ranks read."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            assert float(trainer.callback_metrics["turns_epoch"]) == 1.5


def logged(rank: int, world: int) -> list[dict[str, float]]:
    looks = LooksOnOneRank()
    run = trainer(world, looks, plugins=Mesh3DPrecision("64-true"), max_epochs=1, use_distributed_sampler=False)
    run.fit(OnSomeRanks(), loader(share(batch, rank, world) for batch in BATCHES))
    return [*looks.seen, {name: float(value) for name, value in run.callback_metrics.items()}]


def test_names_of_some_ranks_are_known_to_all() -> None:
    first, second = run_spmd(logged, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert mine == pytest.approx(theirs)
    steps, end = first[:-1], first[-1]
    assert [step["turns_step"] for step in steps] == [1.0, 2.0, 1.0, 2.0]
    assert [step["total_step"] for step in steps] == [0.0, 1.0, 2.0, 3.0]
    assert [step["mean_step"] for step in steps] == pytest.approx([1 / 3] * 4)
    expected = {"turns_epoch": 1.5, "turns_max_epoch": 3.0, "total_epoch": 6.0, "largest": 3.0, "late": 5.0}
    assert {name: end[name] for name in expected} == expected
    assert end["mean_epoch"] == pytest.approx(1 / 3)
    assert end["gathered"] == 1.0
