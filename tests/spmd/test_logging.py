"""What is logged, reduced and decided: the same on every rank as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.strategy.logging.collectives import DataCollectives
from lightning_3d.strategy.run import whole_world
from tests.spmd.fits import loader, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import CLASSES, WIDTH, Plain, classified

pytestmark = pytest.mark.spmd

BATCHES = classified(6, 8)


class Logs(Plain):
    """Logs in every way, values of all kinds, from the step and from hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.total, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs)
        each = F.cross_entropy(logits, targets, reduction="none")
        both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", each.mean(), prog_bar=True, **both)
        self.log("sum", each.sum(), reduce_fx="sum", **both)
        self.log("largest", each.max(), reduce_fx="max", **both)
        self.log("smallest", each.min(), reduce_fx=torch.min, **both)
        self.log_dict({"count": float(len(targets)), "narrow": each.mean().bfloat16()}, reduce_fx="sum", **both)
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.total.update(each.sum())
        self.log("total", self.total)
        self.mean.update(each)
        self.log("mean", self.mean, on_epoch=True)
        return each.mean()

    def on_after_backward(self) -> None:
        self.log("backward_norm", grad_norm(self, 2)["grad_2.0_norm_total"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2))

    def on_train_epoch_end(self) -> None:
        self.log("weight_norm", self.model.blocks[0].linear.weight.norm())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.model(inputs), targets), sync_dist=True)


def logged(rank: int, world: int, options: list[dict[str, Any]]) -> list[dict[str, float]]:
    found = []
    for strategy in options:
        torch.manual_seed(0)
        run = trainer(
            world,
            strategy=strategy,
            plugins=Mesh3DPrecision("64-true"),
            max_epochs=2,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
        )
        mine = [share(batch, rank, world) for batch in BATCHES]
        run.fit(Logs(), loader(mine), loader(mine[:2]))
        assert not any("DTensor" in type(value).__name__ for value in run.callback_metrics.values())
        found.append({name: float(value) for name, value in run.callback_metrics.items()})
    return found


def test_logged_values_equal_one_device_on_every_rank() -> None:
    stages = [{"zero_stage": stage} for stage in (0, 1, 3)]
    halves = [stage | {"num_microbatches": 2} for stage in stages]
    one = run_spmd(logged, 1, [{"num_microbatches": 2}, {"num_microbatches": 4}])[0]
    for found in run_spmd(logged, 2, [*stages, *halves]):
        for values, expected in zip(found, 3 * [one[0]] + 3 * [one[1]], strict=True):
            assert values.keys() == expected.keys()
            assert len(values) > 40
            for name, value in expected.items():
                # Narrow values round before they are added up, states of metrics are fp32.
                loose = {"narrow": 1e-2, "mean": 1e-6, "total": 1e-6}.get(name.split("_")[0], 1e-11)
                close = pytest.approx(value, rel=loose, abs=1e-13)
                assert values[name] == close, name


# ---- the strategy's own reductions ----


class Reduces(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = self.global_rank
        strategy: Any = self.trainer.strategy
        for name in ("mean", "sum", "max", "min"):
            self.seen[name] = strategy.reduce(torch.tensor([rank + 1.0, 5.0]), reduce_op=name).tolist()
        self.seen["ints"] = [strategy.reduce(torch.tensor(rank + 1), reduce_op=name).item() for name in ("sum", "mean")]
        narrow = strategy.reduce(torch.tensor(rank + 1.0, dtype=torch.bfloat16), reduce_op="mean")
        self.seen["narrow"] = (narrow.item(), str(narrow.dtype))
        self.seen["any"] = strategy.reduce_boolean_decision(rank == 1, all=False)
        self.seen["all"] = strategy.reduce_boolean_decision(rank == 1, all=True)
        self.seen["other"] = strategy.reduce("text")
        self.seen["word"] = strategy.broadcast(f"from {rank}")
        rows = self.all_gather({"a": torch.full((2, 3), float(rank)), "b": rank})
        self.seen["gathered"] = (tuple(rows["a"].shape), rows["a"][:, 0, 0].tolist(), rows["b"].tolist())
        mine = torch.tensor([1.0 + rank], requires_grad=True)
        (self.all_gather(mine, sync_grads=True).squeeze() * torch.tensor([3.0, 4.0])).sum().backward()
        assert mine.grad is not None
        self.seen["gathered_gradient"] = mine.grad.item()
        assert not self.all_gather(mine).requires_grad
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def reduced(rank: int, world: int) -> dict[str, Any]:
    module = Reduces()
    trainer(world, max_epochs=1).fit(module, loader([torch.ones(1, 1)] * world))
    return module.seen


def test_reductions_of_the_strategy() -> None:
    for rank, seen in enumerate(run_spmd(reduced, 2)):
        assert seen == {
            "mean": [1.5, 5.0],
            "sum": [3.0, 10.0],
            "max": [2.0, 5.0],
            "min": [1.0, 5.0],
            "ints": [3, 1.5],
            "narrow": (1.5, "torch.bfloat16"),
            "any": True,
            "all": False,
            "other": "text",
            "word": "from 0",
            "gathered": ((2, 2, 3), [0.0, 1.0], [0, 1]),
            "gathered_gradient": 2 * [3.0, 4.0][rank],
        }


# ---- decisions ----


class Decides(Plain):
    """A validation loss that each rank sees differently."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank, epoch = self.trainer.global_rank, self.current_epoch
        self.log("val_loss", [1.0, 3.0, 2.0, 4.0, 5.0][epoch] + [0.0, -2.0][rank] * (epoch == 2), sync_dist=True)


def decided(rank: int, world: int, directory: Path) -> tuple[int, str, float, int]:
    keeper = ModelCheckpoint(directory, monitor="val_loss", filename="{epoch}-{val_loss:.2f}", save_top_k=2)
    stopper = EarlyStopping("val_loss", patience=3)
    options = {"max_epochs": 9, "enable_checkpointing": True, "use_distributed_sampler": False}
    run = trainer(world, keeper, stopper, strategy={"zero_stage": 2}, plugins=Mesh3DPrecision("64-true"), **options)
    run.fit(Decides(), loader(share(batch, rank, world) for batch in BATCHES[:1]), loader(BATCHES[:1]))
    return stopper.stopped_epoch, keeper.best_model_path, float(keeper.best_model_score), run.global_step


def test_ranks_decide_alike(tmp_path: Path) -> None:
    first, second = run_spmd(decided, 2, tmp_path)
    assert first == second
    stopped, best, score, steps = first
    # Epochs give 1, 3, 1 (the mean of 2 and 0), 4, 5: none is below the first.
    assert (stopped, score, steps) == (3, 1.0, 4)
    assert Path(best).name.startswith("epoch=0-val_loss=1.00")
    assert len(list(tmp_path.iterdir())) == 2


# ---- data and randomness by data rank ----


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Watches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.orders: list[list[int]] = [[], [], []]
        self.noise: list[float] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.orders[self.current_epoch] += batch[0].tolist()
        self.noise += batch[1].tolist()
        return self.model(torch.ones(1, WIDTH)).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def watched(rank: int, world: int) -> tuple[list[list[int]], list[float], int]:
    L.seed_everything(1, workers=True, verbose=False)
    module = Watches()
    data: Any = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    trainer(world, max_epochs=3, accumulate_grad_batches=2).fit(module, data)
    return module.orders, module.noise, module.steps


def test_each_data_rank_has_its_own_samples_order_and_noise() -> None:
    (orders, noise, steps), (others, other_noise, other_steps) = run_spmd(watched, 2)
    # 16 samples over 2 ranks and 4 a batch: 2 batches an epoch, 1 step each.
    assert steps == other_steps == 3
    for mine, theirs in zip(orders, others, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert orders[0] != orders[1] != orders[2]
    assert not set(noise) & set(other_noise)


# ---- buffers ----


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(self.norm(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not torch.is_inference_mode_enabled()
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Statistics(Callback):
    """The running mean when validation begins, on this rank."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.means.append(pl_module.get_buffer("norm.running_mean").clone())


def normed(rank: int, world: int, stages: tuple[int, ...]) -> list[Any]:
    found = []
    for stage in stages:
        statistics = Statistics()
        run = trainer(
            world,
            statistics,
            strategy=Mesh3DStrategy(zero_stage=stage),
            max_epochs=2,
            use_distributed_sampler=False,
        )
        batches = [share((inputs.float(), targets), rank, world) for inputs, targets in BATCHES]
        torch.manual_seed(0)
        module = Normed()
        run.fit(module, loader(batches), loader(batches))
        run.validate(module, loader(batches), verbose=False)
        run.fit_loop.max_epochs = 3
        run.fit(module, loader(batches), loader(batches))
        strategy: Any = run.strategy
        state = strategy.full_state_dict()
        found.append((statistics.means, {name: value for name, value in state.items() if name.startswith("norm.")}))
    return found


def test_running_statistics_are_the_first_ranks() -> None:
    first, second = run_spmd(normed, 2, (0, 2))
    for (means, state), (other_means, other_state) in zip(first, second, strict=True):
        assert len(means) == 6  # three epochs, two sanity checks, and the run between the fits
        for mine, theirs in zip(means, other_means, strict=True):
            assert torch.equal(mine, theirs)
        assert state["norm.num_batches_tracked"] == other_state["norm.num_batches_tracked"] == 18
        assert all(torch.equal(state[name], other_state[name]) for name in ("norm.running_mean", "norm.running_var"))
        expected = torch.zeros(WIDTH)
        for inputs, _ in BATCHES:
            expected = 0.9 * expected + 0.1 * inputs[:4].float().mean(dim=0)
        torch.testing.assert_close(means[1], expected)


# ---- a rank that does not count ----

OPERATIONS = ("mean", "sum", "max", "min", "product", *(getattr(dist.ReduceOp, n) for n in ("MAX", "MIN", "PRODUCT")))
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def counted_once(rank: int, world: int) -> None:
    collectives = DataCollectives(whole_world(), whole_world(), torch.device("cpu"))
    collectives.weight = float(rank == 0)
    for dtype in DTYPES:
        own = torch.tensor([3, 2, 0] if dtype == torch.uint8 else [-3, 2, 0]).to(dtype)
        for operation in OPERATIONS:
            tensor = own.clone() if rank == 0 else (1 - own.double()).to(dtype)
            given = tensor.clone()
            found = collectives.reduce(tensor, None, operation)
            assert torch.equal(found.double(), own.double()), (dtype, operation)
            assert torch.equal(tensor, given)


def test_a_rank_that_does_not_count_changes_no_reduction() -> None:
    run_spmd(counted_once, 2)
