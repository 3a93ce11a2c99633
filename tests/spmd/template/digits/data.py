"""The data: a table of numbers, found by a path as the user gives it."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, Dataset, TensorDataset

_TRAINED = 16


class DigitsData(L.LightningDataModule):
    """Rows of ``digits.csv``: inputs, and a class in the last column. Its settings are a part of the configuration."""

    def __init__(self, settings: DictConfig) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str) -> None:
        ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        self.batch_size_per_device = self.hparams.settings.batch_size // ranks
        table = torch.from_numpy(np.loadtxt(Path(self.hparams.settings.data_dir, "digits.csv")))
        samples = TensorDataset(table[:, :-1], table[:, -1].long())
        self.trained, self.held_out = torch.utils.data.random_split(
            samples, [_TRAINED, len(table) - _TRAINED], torch.Generator().manual_seed(42)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.trained, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.held_out)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.held_out)

    def _loader(self, samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        return DataLoader(samples, self.batch_size_per_device, **options)
