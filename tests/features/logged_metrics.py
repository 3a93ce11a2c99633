"""Metrics of torchmetrics: logged as objects, computed by hand, over windows, in few bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import (
    AUROC,
    CatMetric,
    ConfusionMatrix,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMetric,
    SumMetric,
)
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.wrappers import ClasswiseWrapper, Running

from tests.features.here import Here
from tests.features.logged_values import Uneven
from tests.features.modules import CLASSES, Module
from tests.features.shown import Staged, every_loop
from tests.features.table import Seen


def of_classes() -> dict[str, Metric]:
    """Returns metrics of classes, each a state of another kind."""
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "auroc": AUROC(task="multiclass", num_classes=CLASSES),
    }


class Objects(Staged):
    """Logs metrics as objects, which Lightning computes and resets."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({stage: self.kinds() for stage in ("on_train", "on_val", "on_test")})

    def kinds(self) -> nn.ModuleDict:
        """Returns the metrics of a stage."""
        values = {"mean": MeanMetric(), "sum": SumMetric(), "max": MaxMetric(), "min": MinMetric()}
        together = MetricCollection({"acc": MulticlassAccuracy(CLASSES), "pre": MulticlassPrecision(CLASSES)})
        return nn.ModuleDict(
            {
                "numbers": nn.ModuleDict(values),
                "classes": nn.ModuleDict(of_classes()),
                "together": together.clone(prefix="together_"),
            }
        )

    def shared(self, stage: str, batch: Any) -> Tensor:
        """Counts, logs, and returns the loss."""
        inputs, targets = batch
        logits = self(inputs)
        each = F.cross_entropy(logits, targets, reduction="none")
        kinds: Any = self.stages[f"on_{stage}"]
        for name, metric in kinds["numbers"].items():
            metric(each)
            self.log(f"{stage}_{name}", metric, on_step=True, on_epoch=True, prog_bar=True)
        for name, metric in kinds["classes"].items():
            # A few samples lack some classes, of which there is no curve.
            count = metric.update if name == "auroc" else metric
            count(logits.softmax(-1), targets)
            self.log(f"{stage}_{name}", metric, on_step=name != "auroc", on_epoch=True)
        kinds["together"].update(logits, targets)
        self.log_dict(kinds["together"], on_step=False, on_epoch=True)
        return each.mean()


def objects(here: Here) -> Seen:
    return every_loop(here, Objects(), Uneven(here))


class ByHand(Module):
    """Counts in the steps, and computes and resets metrics itself at the end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.per_class = MulticlassAccuracy(CLASSES, average=None)
        self.matrix = ConfusionMatrix(task="multiclass", num_classes=CLASSES)
        self.listed = nn.ModuleList([MeanMetric(), SumMetric()])
        # Not in the module's tree.
        self.plain = {"cat": CatMetric(), "accuracy": MulticlassAccuracy(CLASSES, average="micro")}
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.tracker = MetricTracker(MulticlassAccuracy(CLASSES, average="micro"))
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        each = F.cross_entropy(logits, batch[1], reduction="none")
        for metric in self.listed:
            metric.update(each.detach())
        self.plain["cat"].update(each.detach())
        # By value, of the batch alone.
        self.log("by_value", self.plain["accuracy"](logits, batch[1]), on_step=True, on_epoch=True)
        self.per_class.update(logits, batch[1])
        return each.mean()

    def on_train_epoch_end(self) -> None:
        values = self.plain["cat"].compute()
        self.log_dict(
            {"spread": values.std(), "mean": self.listed[0].compute(), "plain": self.plain["accuracy"].compute()}
        )
        self.log_dict({f"class_{index}": value for index, value in enumerate(self.per_class.compute())})
        self.found.append((values.sort().values, self.listed[1].compute()))
        for metric in (*self.listed, *self.plain.values(), self.per_class):
            metric.reset()

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.matrix.update(logits, batch[1])
        self.classwise.update(logits, batch[1])
        self.tracker.update(logits, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.found.append(self.matrix.compute())
        self.log_dict(self.classwise.compute())
        self.log("tracked", self.tracker.compute())
        if not self.trainer.sanity_checking:
            best, epoch = self.tracker.best_metric(return_step=True)
            self.found.append((best, epoch, self.tracker.compute_all()))
        self.matrix.reset()
        self.classwise.reset()


def by_hand(here: Here) -> Seen:
    module = ByHand()
    seen = every_loop(here, module, num_sanity_val_steps=0)
    return {**seen, "found": module.found}


class Windowed(Module):
    """Logs metrics over a window of the last batches."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Running(MeanMetric(), window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last(loss.detach())
        self.log("last", self.last, on_step=True, on_epoch=True)
        return loss


def windowed(here: Here) -> Seen:
    return every_loop(here, Windowed())


class Narrow(Module):
    """Logs values in bfloat16, and metrics whose states are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric().set_dtype(torch.bfloat16)
        self.mean.mean_value = self.mean.mean_value.bfloat16()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss((batch[0].float(), batch[1]))
        narrow = batch[1].double().mean().bfloat16()
        self.log("narrow", narrow, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch[1].max().bfloat16(), on_step=True, on_epoch=True, reduce_fx="max")
        self.mean(narrow)
        self.log("mean", self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0].float(), batch[1]), batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step((batch[0].float(), batch[1]), batch_idx)


def narrow(here: Here) -> Seen:
    return every_loop(here, Narrow(), None, precision="bf16-mixed")
