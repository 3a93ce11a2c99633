"""A small model with every kind of tensor, trained, saved and loaded in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.generators import random_state
from lightning_3d.checkpoint.layout import module_state
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.restore import StoredCheckpoint, load_module, load_optimizers, open_checkpoint
from lightning_3d.checkpoint.store import CheckpointState, save

CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])


class Model(nn.Module):
    """A tied table, a frozen layer, a layer that no loss uses, a persistent and a passing buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.table(tokens))))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.arange(8).mul(step + 3).remainder(7)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_all(
    path: Path | str, model: nn.Module, optimizers: list[torch.optim.Optimizer], *, distributed: bool, **metadata: Any
) -> None:
    checkpoint = {
        **metadata,
        "state_dict": module_state(model),
        "optimizer_states": [optimizer_state(model, optimizer) for optimizer in optimizers],
    }
    save(path, CheckpointState.of(checkpoint, random_state(CPU)), distributed=distributed, group=None)


def opened(path: Path | str, weights_only: bool | None = None) -> StoredCheckpoint:
    return open_checkpoint(path, weights_only=weights_only, group=None)


def load_all(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    stored = opened(path)
    load_module(stored, model, strict=True, group=None)
    load_optimizers(stored, model, optimizers, group=None)
