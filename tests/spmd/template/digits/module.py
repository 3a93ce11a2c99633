"""The LightningModule: its network, optimizer and scheduler come ready from the configuration."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric, MinMetric
from torchmetrics.classification import MulticlassAccuracy


class DigitsModule(L.LightningModule):
    """Classifies."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Any],
        scheduler: Callable[..., Any],
        settings: DictConfig,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.val_loss, self.val_best = MeanMetric(), MinMetric()
        self.accuracy = MulticlassAccuracy(settings.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)[0]
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self._loss(batch)
        self.val_loss(loss)
        self.accuracy(logits, batch[1])
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_best(self.val_loss.compute())
        self.log("val/loss_best", self.val_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self._loss(batch)[0], on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.hparams.scheduler(optimizer=optimizer)}

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self(inputs)
        return F.cross_entropy(logits, targets, label_smoothing=self.hparams.settings.smoothing), logits
