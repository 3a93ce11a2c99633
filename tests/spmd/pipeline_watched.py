"""A module that the Trainer runs on a pipeline and on one device, and that writes down what it sees."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.spmd.fits import normal
from tests.spmd.toys import CLASSES, WIDTH, Net

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
        logits: Tensor = self(inputs)
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


def values(trainer: Trainer) -> dict[str, float]:
    """What was logged last."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Everything in the state dict."""
    strategy: Any = trainer.strategy
    return {name: value for name, value in strategy.full_state_dict().items() if isinstance(value, Tensor)}
