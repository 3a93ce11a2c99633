"""Checkpoints while training, and one of its very end."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class EndCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose last checkpoint is the last step also if training ends between two saves."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
