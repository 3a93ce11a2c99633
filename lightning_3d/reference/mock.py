"""Random batches in the place of data: for measuring speed, and for verbs that run nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class RandomSamples(Dataset[Any]):
    """Samples of random numbers; sample i is the same in every process.

    Args:
        shapes: Shape of each tensor of a sample, by name.
        limits: Name to the number of whole numbers to draw from; other tensors are normal.
        count: Number of samples.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], limits: Mapping[str, int], count: int) -> None:
        self.shapes, self.limits, self.count = shapes, limits, count

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one tensor for each name."""
        generator = torch.Generator().manual_seed(index)
        return {name: self._drawn(name, shape, generator) for name, shape in self.shapes.items()}

    def _drawn(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name in self.limits:
            return torch.randint(0, self.limits[name], shape, generator=generator)
        return torch.randn(shape, generator=generator)


class MockDataModule(L.LightningDataModule):
    """Batches of random tensors.

    Args:
        shapes: Shape of each tensor of a sample, by name.
        limits: Name to the number of whole numbers to draw from; other tensors are normal.
        batch_size: Samples of a batch.
        count: Samples of an epoch; None for one batch.
        only: A name, if the batch is that tensor alone and not a mapping.
    """

    def __init__(
        self,
        shapes: Mapping[str, Any],
        limits: Mapping[str, int] | None = None,
        batch_size: int = 1,
        count: int | None = None,
        only: str | None = None,
    ) -> None:
        super().__init__()
        self.shapes = {str(name): tuple(int(length) for length in shape) for name, shape in shapes.items()}
        self.limits = {str(name): int(limit) for name, limit in (limits or {}).items()}
        self.batch_size = batch_size
        self.count = batch_size if count is None else count
        self.only = only

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the loader of the samples, in order."""
        samples: Dataset[Any] = RandomSamples(self.shapes, self.limits, self.count)
        if self.only is not None:
            samples = _OneOf(samples, self.only)
        return DataLoader(samples, batch_size=self.batch_size)


class _OneOf(Dataset[Tensor]):
    """One tensor of each sample."""

    def __init__(self, samples: Any, name: str) -> None:
        self.samples, self.name = samples, name

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        found: Tensor = self.samples[index][self.name]
        return found
