"""The pipeline axis through the Trainer, as users use it: every rank sees what one device sees."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import ModuleError
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader, normal
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, seen_alike, tokens
from tests.spmd.toys import CLASSES, WIDTH, Net, Plain

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

TWO: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


def samples(count: int, size: int = 4, seed: int = 5) -> DataLoader[Any]:
    """A loader in order; the last batch may be short."""
    targets = torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(normal(seed, count, WIDTH), targets), batch_size=size)


class Watched(L.LightningModule):
    """Logs in every way, keeps metrics of every kind, and writes down what its hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.counted = SumMetric()
        self.all = CatMetric()
        self.many = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "precise": MulticlassAccuracy(CLASSES, average="macro")}
        )
        self.val_accuracy, self.val_mean = MulticlassAccuracy(CLASSES), MeanMetric()
        self.seen: dict[str, list[Any]] = {}

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(value)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        # Of the batch alone, before the first block.
        self.counted(torch.tensor(float(len(targets))))
        self.log("counted", self.counted, **both)
        self.log("samples", float(len(targets)), reduce_fx="sum", **both)
        logits = self(inputs)
        each = F.cross_entropy(logits, targets, reduction="none")
        self.log("loss", each.mean(), prog_bar=True, sync_dist=True, **both)
        self.log_dict({"largest": logits.max(), "smallest": logits.min()}, reduce_fx="max", on_epoch=True)
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, **both)
        self.all.update(each)
        self.log_dict(self.many(logits, targets), on_step=False, on_epoch=True)
        return {"loss": each.mean(), "logits": logits, "spread": logits.std(), "text": "here"}

    def on_before_backward(self, loss: Tensor) -> None:
        assert loss.requires_grad
        self.note("before_backward", float(loss.detach()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (len(batch[1]), CLASSES)
        self.note("outputs", [float(outputs["loss"]), float(outputs["spread"]), outputs["text"]])
        shown = self.trainer.progress_bar_metrics
        self.note("bar", {name: float(value) for name, value in shown.items()})

    def on_train_epoch_end(self) -> None:
        self.note("all", self.all.compute().sort().values.double())
        self.all.reset()
        self.log_dict({f"epoch_{name}": value for name, value in self.many.compute().items()})
        self.many.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        logits = self(inputs)
        self.log("val_loss", F.cross_entropy(logits, targets), sync_dist=True)
        self.val_accuracy(logits, targets)
        self.log("val_accuracy", self.val_accuracy)
        self.val_mean.update(logits)
        return logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("val_outputs", outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_mean.compute())
        self.val_mean.reset()
        self.note("called", self(normal(3, 2, WIDTH)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch[0])
        return {"logits": logits, "best": logits.argmax(-1)}

    def configure_optimizers(self) -> Any:
        weights = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-2, fused=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Hooks(Callback):
    """Writes down every hook, its own and the module's, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def watch(self, module: LightningModule) -> None:
        for owner, prefix in ((self, "callback"), (module, "module")):
            for name in dir(type(owner)):
                if name.startswith("on_") or name in ("setup", "teardown", "optimizer_step", "optimizer_zero_grad"):
                    self._watch(owner, name, f"{prefix} {name}")

    def _watch(self, owner: Any, name: str, shown: str) -> None:
        method = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.order.append(shown)
            return method(*args, **kwargs)

        owner.__dict__[name] = called


def values(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    strategy: Any = trainer.strategy
    return {name: value for name, value in strategy.full_state_dict().items() if isinstance(value, Tensor)}


# ---- everything at once ----


def every_loop(ranks: Ranks) -> Any:
    module = Watched()
    trainer = ranks.trainer(
        max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2, strategy={"num_microbatches": 2}
    )
    # The last batch has 3 samples, in micro-batches of 2 and 1; the last window is short.
    trainer.fit(module, samples(19), samples(7))
    found = [values(trainer), weights(trainer)]
    found.append(trainer.validate(module, samples(7), verbose=False))
    found.append(trainer.test(module, samples(9), verbose=False))
    found.append(trainer.predict(module, samples(6)))
    return found, module.seen


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbvzerobubble"])
def test_every_loop_and_hook_sees_what_one_device_sees(schedule: str) -> None:
    found, seen = seen_alike(every_loop, **TWO, pipeline_schedule=schedule)
    assert len(seen["outputs"]) == 10
    assert {"loss_step", "accuracy_epoch", "counted_epoch", "epoch_f1", "val_accuracy", "val_mean"} <= set(found[0])


def hooks_in_order(ranks: Ranks) -> list[str]:
    module, hooks = Watched(), Hooks()
    hooks.watch(module)
    trainer = ranks.trainer(hooks, max_epochs=2, accumulate_grad_batches=2, strategy={"num_microbatches": 2})
    trainer.fit(module, samples(10), samples(4))
    # Before, a plan is made from the first batch.
    return hooks.order[hooks.order.index("callback on_fit_start") :]


def test_hooks_run_in_one_devices_order_on_every_rank() -> None:
    order = seen_alike(hooks_in_order, **TWO)
    assert order.count("module on_after_backward") == 6
    assert order.count("module on_before_optimizer_step") == 4


# ---- decisions ----


class Decides(Watched):
    """A monitored value that gets better, and then worse."""

    def on_validation_epoch_end(self) -> None:
        self.log("chosen", self.val_mean.compute() * 0 + [3.0, 1.0, 2.0, 2.5, 4.0][self.current_epoch])


def decided(ranks: Ranks) -> Any:
    with tempfile.TemporaryDirectory() as alone:
        strategy: Any = {"num_microbatches": 2}
        keeper = ModelCheckpoint(monitor="chosen", filename="{epoch}-{chosen:.2f}", save_top_k=2)
        stopper = EarlyStopping("chosen", patience=2)
        trainer = ranks.trainer(
            keeper,
            stopper,
            max_epochs=9,
            enable_checkpointing=True,
            default_root_dir=alone,
            strategy=strategy,
            num_sanity_val_steps=0,
        )
        module = Decides()
        trainer.fit(module, samples(8), samples(5))
        best = Path(keeper.best_model_path).name
        return stopper.stopped_epoch, best, float(keeper.best_model_score or 0), trainer.global_step, values(trainer)


def test_checkpoints_and_ends_are_those_of_one_device() -> None:
    stopped, best, score, steps, _ = seen_alike(decided, **TWO)
    assert (stopped, score, steps) == (3, 1.0, 8)
    assert best.startswith("epoch=1-chosen=1.00")


# ---- weights of losses ----


class Weighted(Watched):
    """Some samples do not count."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        each = F.cross_entropy(self(inputs), targets, reduction="none")
        counts = (inputs[:, 0] > 0).double() + 0.25
        loss = (each * counts).sum() / counts.sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "loss_weight": counts.sum(), "logits": torch.zeros(len(targets), CLASSES)} | SEEN

    def on_train_epoch_end(self) -> None:
        self.note("end", self.current_epoch)


SEEN: dict[str, Any] = {"spread": torch.tensor(0.0), "text": "here"}


def weighted(ranks: Ranks) -> Any:
    module = Weighted()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trainer = ranks.trainer(max_epochs=2, strategy={"num_microbatches": 3}, **options)
    trainer.fit(module, samples(19), samples(4))
    return module.seen, values(trainer), weights(trainer)


def test_weighted_losses_are_one_mean() -> None:
    seen_alike(weighted, **TWO)


# ---- evaluation that no schedule can run ----


class Reads(Watched):
    """Looks at a hidden state between the blocks, in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.model.blocks:
            hidden = block(hidden)
            if hidden.abs().max().item() > 1e6:
                raise OverflowError
        logits = self.model.head(hidden)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.val_mean.update(logits)
        return logits


def reads(ranks: Ranks) -> Any:
    module = Reads()
    trainer = ranks.trainer(strategy={"num_microbatches": 2})
    trainer.fit(module, samples(8), samples(7))
    found = values(trainer)
    # Its states are fp32, and have seen the samples of a batch together.
    assert math.isclose(found.pop("val_mean"), -0.1703974, rel_tol=1e-6)
    return found, module.seen


def test_a_validation_that_reads_hidden_states_runs_on_all_stages_together() -> None:
    seen_alike(reads, **TWO)


# ---- several data ranks, and ends that are not even ----


def uneven(ranks: Ranks) -> Any:
    module = Watched()
    data = 2 if ranks.cut else 1
    strategy = {"num_microbatches": 4 // data}
    trainer = ranks.trainer(strategy=strategy, max_epochs=2, use_distributed_sampler=ranks.cut)
    # 7 samples are 4 on one data rank and 3 on the other, 2 + 2 and 2 + 1; 3 are 1 + 1 and 1.
    return [trainer.validate(module, samples(count, size=8 // data), verbose=False) for count in (7, 3)]


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
def test_uneven_validation_on_two_data_ranks() -> None:
    found = seen_alike(uneven, 4, **TWO, zero_stage=3)
    assert all({"val_loss", "val_accuracy", "val_mean"} <= set(each[0]) for each in found)


# ---- what is refused ----


class NoLoss(Watched):
    """Has no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if batch_idx == 0 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("loss", float(outputs["loss"]))


class Lbfgs(Watched):
    """All parameters in one vector."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Manual(Watched):
    """Goes backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


REFUSED: dict[str, tuple[type[Watched], str]] = {
    "no loss": (NoLoss, "training_step returned no loss for a micro-batch"),
    "one vector": (Lbfgs, "LBFGS takes all parameters as one vector"),
    "manual": (Manual, "Manual sets automatic_optimization=False"),
}


def refused(rank: int, world: int, names: list[str]) -> list[str]:
    found = []
    for name in names:
        trainer = Ranks(world=world, strategy=TWO).trainer(strategy={"num_microbatches": 2})
        # The other ranks learn of a failure by the end of the process group, which other cases need.
        trainer.strategy.on_exception = lambda exception: None  # type: ignore[method-assign]
        with pytest.raises(ModuleError) as caught:
            trainer.fit(REFUSED[name][0](), samples(8), samples(4))
        found.append(str(caught.value))
    return found


def test_errors_are_the_same_on_all_ranks() -> None:
    first, second = run_spmd(refused, 2, list(REFUSED))
    assert first == second
    for text, (_, expected) in zip(first, REFUSED.values(), strict=True):
        assert expected in text


# ---- optimizers of parameters that are elsewhere ----


class HeadOnly(Watched):
    """Trains what the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=0.1, foreach=True)


class Thaws(BaseFinetuning):
    """Lets the blocks train from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer, lr=1e-2)


def head_only(ranks: Ranks) -> Any:
    module = HeadOnly()
    trainer = ranks.trainer(max_epochs=2, strategy={"num_microbatches": 2}, gradient_clip_val=0.1)
    trainer.fit(module, samples(8), samples(4))
    return values(trainer), weights(trainer)


def thawed(ranks: Ranks) -> Any:
    module, thaws = HeadOnly(), Thaws()
    trainer = ranks.trainer(thaws, max_epochs=3, strategy={"num_microbatches": 2})
    trainer.fit(module, samples(8), samples(4))
    names = [group["params"] for group in thaws._internal_optimizer_metadata[0]]
    return values(trainer), weights(trainer), names


def test_an_optimizer_may_have_nothing_on_a_rank() -> None:
    seen_alike(head_only, **TWO)


def test_layers_that_are_thawed_train() -> None:
    *_, names = seen_alike(thawed, **TWO)
    assert [len(each) for each in names] == [2, 16]


# ---- one loss scale ----


def scaled(ranks: Ranks) -> Any:
    torch.set_default_dtype(torch.float32)
    module = Plain()
    trainer = ranks.trainer(strategy={"num_microbatches": 2}, plugins=Mesh3DPrecision("16-mixed"), max_epochs=2)
    batches = [(inputs.float(), targets) for inputs, targets in samples(8)]
    # A loss that overflows on the last stage makes every rank skip its step.
    batches[1][0].mul_(1e30)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.precision_plugin.scaler is not None
    return float(trainer.precision_plugin.scaler.get_scale()), trainer.global_step


def test_all_ranks_have_one_loss_scale() -> None:
    scale, _ = seen_alike(scaled, **TWO)
    assert scale == 2.0**14


# ---- metrics of ranks that see the same samples ----


class Sums(NextToken):
    """Counts samples."""

    def __init__(self) -> None:
        super().__init__(PackedGPT())
        self.count = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.update(torch.tensor(float(len(batch[0]))))
        self.log("count", self.count, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def counted(ranks: Ranks) -> Any:
    trainer = ranks.trainer(strategy={"num_microbatches": 2})
    trainer.fit(Sums(), loader(tokens(2)))
    return values(trainer)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_sample_counts_once(axis: str) -> None:
    degrees = TWO if axis == "pipeline" else {}
    assert seen_alike(counted, **degrees)["count"] == 8.0
