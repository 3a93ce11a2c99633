"""Values that are logged: scalars with every reduction, from every hook, by few ranks or for few batches."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.features.here import Here
from tests.features.modules import CLASSES, Data, Module, Samples
from tests.features.shown import Staged, every_loop
from tests.features.table import Seen

# ---- scalars ----


class Scalars(Staged):
    """Logs scalars with every reduction, in every stage.

    Args:
        sync: The ``sync_dist`` of all of them.
    """

    def __init__(self, *, sync: bool) -> None:
        super().__init__()
        self.sync = sync

    def shared(self, stage: str, batch: Any) -> Tensor:
        """Logs, and returns the loss."""
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": self.sync}
        self.log(f"{stage}_mean", each.mean(), prog_bar=True, **both)
        self.log(f"{stage}_sum", each.sum(), reduce_fx="sum", **both)
        self.log(f"{stage}_max", each.max(), reduce_fx=torch.max, **both)
        self.log(f"{stage}_min", each.min(), reduce_fx=min, prog_bar=True, **both)
        self.log(f"{stage}_count", len(each), reduce_fx=sum, **both)
        self.log_dict({f"{stage}_only": each.mean(), f"{stage}_one": 1.0}, sync_dist=self.sync)
        self.log(f"{stage}_epoch", each.mean(), on_step=False, on_epoch=True, sync_dist=self.sync)
        self.log(f"{stage}_step", each.mean(), on_step=True, on_epoch=False, sync_dist=self.sync, logger=False)
        return each.mean()


def scalars(here: Here) -> Seen:
    return every_loop(here, Scalars(sync=True))


def scalars_without_sync(here: Here) -> Seen:
    return every_loop(here, Scalars(sync=False), None)


class Uneven(Data):
    """Batches whose size no number of ranks or micro-batches divides, the last one shorter; in training it is even."""

    def __init__(self, here: Here) -> None:
        super().__init__(here, samples=22, batch_size=6)

    def val_dataloader(self) -> Any:
        return self.here.loader(Samples(15, seed=1), 6)

    def test_dataloader(self) -> Any:
        return self.here.loader(Samples(11, seed=2), 6)


class Sized(Scalars):
    """Says itself how many samples a value stands for."""

    def shared(self, stage: str, batch: Any) -> Tensor:
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        chosen = each[batch[1] > 0]
        both: dict[str, Any] = {"on_step": stage == "train", "on_epoch": True, "sync_dist": self.sync}
        self.log(f"{stage}_sized", each.mean(), batch_size=len(each), **both)
        # A mean of the samples of some classes only: their number differs from batch to batch.
        self.log(f"{stage}_chosen", chosen.sum() / max(len(chosen), 1), batch_size=len(chosen), **both)
        self.log(f"{stage}_constant", 1.0, **both)
        return each.mean()


def sizes(here: Here) -> Seen:
    return every_loop(here, Sized(sync=True), Uneven(here))


# ---- hooks ----


class Everywhere(Module):
    """Logs in every hook that may."""

    def tell(self, hook: str, value: Any = None, **options: Any) -> None:
        """Logs under the name of a hook."""
        self.log(hook, float(self.global_step) if value is None else value, sync_dist=True, **options)

    def on_train_start(self) -> None:
        self.tell("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.tell("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_start", batch[0].mean())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.tell("on_before_zero_grad", on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.tell("on_before_backward", loss, on_epoch=True)

    def on_after_backward(self) -> None:
        self.tell("on_after_backward", prog_bar=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.tell("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.tell("configure_gradient_clipping", on_epoch=True, reduce_fx="max")
        self.clip_gradients(optimizer, gradient_clip_val=0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", batch[0].sum(), on_epoch=True, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.tell("on_train_epoch_end")

    def on_validation_start(self) -> None:
        self.tell("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        self.tell("on_validation_epoch_start")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("on_validation_batch_start", batch[0].mean())

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_validation_batch_end", batch[0].sum(), on_step=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.tell("on_validation_epoch_end")

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_test_batch_end", batch[0].mean())

    def on_test_epoch_end(self) -> None:
        self.tell("on_test_epoch_end")


class Tells(Callback):
    """Logs through the module, as callbacks do."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("callback/batch", args[1][0].mean(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("callback/epoch", float(trainer.callback_metrics["train_loss"]) * 2)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("callback/val", args[1][0].mean(), prog_bar=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict({"callback/a": 1.0, "callback/b": float(trainer.current_epoch)})

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        pl_module.log("callback/lr", optimizer.param_groups[0]["lr"])


def hooks(here: Here) -> Seen:
    return every_loop(here, Everywhere(), None, accumulate_grad_batches=2)


def callbacks(here: Here) -> Seen:
    return every_loop(here, Module(), None, Tells())


# ---- loaders ----


class Several(Module):
    """Validates and tests on several loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracies = nn.ModuleList([MulticlassAccuracy(CLASSES, average="micro") for _ in range(2)])

    def shared(self, stage: str, batch: Any, loader: int) -> None:
        """Logs for each loader, and for all of them."""
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log(f"{stage}_loss", each.mean())
        self.log(f"{stage}_step", each.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_sum/{loader}", each.sum(), reduce_fx="sum", add_dataloader_idx=False)
        accuracy = self.accuracies[loader]
        accuracy.update(self(batch[0]), batch[1])
        self.log(f"{stage}_accuracy", accuracy)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.shared("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.shared("test", batch, dataloader_idx)


class SeveralLoaders(Uneven):
    """Two loaders for each evaluation."""

    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), self.here.loader(Samples(6, seed=4), 4)]

    def test_dataloader(self) -> Any:
        return [super().test_dataloader(), self.here.loader(Samples(6, seed=5), 2)]


def several_loaders(here: Here) -> Seen:
    return every_loop(here, Several(), SeveralLoaders(here))


# ---- what only some log ----


class Sometimes(Module):
    """Logs some names for some batches only, as their samples decide."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        if batch_idx % 2:
            self.log("train_odd", each.mean(), on_step=True, on_epoch=True)
        for label in (2, 0, 1):
            chosen = each[batch[1] == label]
            if len(chosen):
                both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": label == 1}
                self.log(f"train_{label}", chosen.mean(), batch_size=len(chosen), **both)
                self.log(f"train_max_{label}", chosen.max(), reduce_fx="max", prog_bar=True, **both)
        return each.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        each = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        for label in (1, 2, 0):
            chosen = each[batch[1] == label]
            if len(chosen):
                self.log(f"val_{label}", chosen.mean(), batch_size=len(chosen))


def sometimes(here: Here) -> Seen:
    seen = every_loop(here, Sometimes(), Data(here, samples=20, batch_size=4))
    # Names come in the order in which some part of a batch first has them.
    return {name: by_name(value) for name, value in seen.items()}


def by_name(value: Any) -> Any:
    """Returns nested values with all mappings in the order of their keys."""
    if isinstance(value, dict):
        return {key: by_name(value[key]) for key in sorted(value)}
    return [by_name(part) for part in value] if isinstance(value, (list, tuple)) else value


class OneRank(Module):
    """Logs from rank 0 alone, as Lightning asks for it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("step", float(batch_idx), rank_zero_only=True)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("zero", float(self.current_epoch + 1), rank_zero_only=True)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("val_zero", 2.0)


def one_rank(here: Here) -> Seen:
    return every_loop(here, OneRank())


class Attributes(Module):
    """Names the attribute of a metric, and keeps values from loggers or graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"a": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.inside["a"](loss)
        self.log("named", self.inside["a"], metric_attribute="inside.a", on_step=False, on_epoch=True)
        self.log("unheard", loss, logger=False, prog_bar=True)
        self.log("graph", loss, enable_graph=True)
        self.log("weight", self.net.head.weight.sum(), on_step=False, on_epoch=True)
        return loss


def attributes(here: Here) -> Seen:
    return every_loop(here, Attributes())


class Prints(Module):
    """Prints by ``self.print``, which speaks once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.print("begin", batch_idx)
        loss = self.loss(batch)
        self.print("positive:", bool(loss > 0), sep="")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.print("batch", batch_idx, end=" is over\n")

    def on_train_epoch_end(self) -> None:
        self.print("end of", self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.print("val", batch_idx)


def prints(here: Here) -> Seen:
    said, trainer = io.StringIO(), here.trainer(limit_train_batches=2, limit_val_batches=1)
    with contextlib.redirect_stdout(said):
        trainer.fit(Prints(), Data(here))
    (here.directory / f"{here.rank}.txt").write_text(said.getvalue())
    trainer.strategy.barrier()
    return {"lines": [line for path in sorted(here.directory.glob("*.txt")) for line in path.read_text().splitlines()]}
