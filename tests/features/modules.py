"""The modules that the features are tried on: nobody wrote them for a mesh."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.features.here import Here

WIDTH, CLASSES, BLOCKS = 8, 3, 4


class Block(nn.Module):
    """A residual block with two linear layers, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Classifies(nn.Module):
    """Blocks between a first layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The same labelled samples everywhere; the first input of each is its index."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        self.inputs[:, 0] = torch.arange(count) / 100
        self.targets = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Module(L.LightningModule):
    """Trains, validates, tests and predicts, as plainly as a LightningModule may.

    Args:
        lr: Learning rate.
    """

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = Classifies()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        """Returns the mean loss of a batch."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    """Loaders of global batches, in order, with a last batch that is short where ``samples`` does not divide.

    Args:
        here: Where it runs.
        samples: Samples to train on; half as many to validate, test and predict on.
        batch_size: Samples of all data ranks together.
    """

    def __init__(self, here: Here, samples: int = 32, batch_size: int = 8) -> None:
        super().__init__()
        self.here, self.samples, self.batch_size = here, samples, batch_size

    def train_dataloader(self) -> Any:
        return self.here.loader(Samples(self.samples), self.batch_size)

    def val_dataloader(self) -> Any:
        return self.here.loader(Samples(self.samples // 2, seed=1), self.batch_size)

    def test_dataloader(self) -> Any:
        return self.here.loader(Samples(self.samples // 2, seed=2), self.batch_size)

    def predict_dataloader(self) -> Any:
        return self.here.loader(Samples(self.samples // 2, seed=3), self.batch_size)


def weights(trainer: L.Trainer) -> dict[str, Tensor]:
    """Returns whole copies of the parameters and buffers of the Trainer's module, by name."""
    from lightning_3d import Mesh3DStrategy

    strategy = trainer.strategy
    if isinstance(strategy, Mesh3DStrategy):
        state = strategy.full_state_dict()
    else:
        state = trainer.lightning_module.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def metrics(trainer: L.Trainer) -> dict[str, float]:
    """Returns what callbacks see of the logged values."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
