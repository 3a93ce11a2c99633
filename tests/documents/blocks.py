"""The Python of the pages, run as it stands: what a page takes for granted is given here.

A page's blocks run one after another in one namespace, as a reader would type them. `MyLightningModule` is a small
Hugging Face Llama; Trainers run a few steps on the CPU. A Trainer that a block makes and does not use is used after it:
an argument that is shown must work.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import Mesh3DStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class MyLightningModule(L.LightningModule):
    """What the pages call the reader's own module."""

    def __init__(self, hidden_size: int = 32) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config(hidden_size))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class MyDataModule(L.LightningDataModule):
    """What the pages call the reader's own data."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        ids: Any = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))
        return DataLoader(ids, batch_size=8)


def config(hidden_size: int = 32) -> LlamaConfig:
    """Returns a model of four layers that any degree in the pages divides."""
    return LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def devices(text: str) -> int:
    """Returns the most devices that a Trainer of a page has."""
    return max((int(number) for number in re.findall(r"Trainer\([^#]*?devices=(\d+)", text)), default=1)


def saved_model(folder: Path) -> Path:
    """Writes a model in Hugging Face's format, as `pretrained=DIR` takes it."""
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(folder)
    return folder


def run_blocks(rank: int, world: int, blocks: list[str], folder: Path, texts: dict[str, str]) -> int:
    """Runs the blocks of a page on this rank, and returns how many trainings took place.

    Args:
        rank: This rank.
        world: Ranks of the page's Trainers.
        blocks: Its Python.
        folder: Where it runs.
        texts: What is another path here.
    """
    os.chdir(folder)
    trained: list[L.Trainer] = []

    class Trainer(L.Trainer):
        def fit(self, *args: Any, **kwargs: Any) -> None:
            trained.append(self)
            super().fit(*args, **kwargs)

    names: dict[str, Any] = {
        "__name__": "__main__",
        "copy": copy,
        "torch": torch,
        "Mesh3DStrategy": Mesh3DStrategy,
        "MyLightningModule": MyLightningModule,
        "MyDataModule": MyDataModule,
        "my_data": MyDataModule(),
        "batch": next(iter(MyDataModule().train_dataloader())),
        "GPT": lambda: LlamaForCausalLM(config()),
        "model": LlamaForCausalLM(config()),
    }
    original, L.Trainer = L.Trainer, functools.partial(Trainer, **QUIET)  # type: ignore[misc,assignment]
    names["L"] = L
    try:
        for block in blocks:
            for there, here in texts.items():
                block = block.replace(there, here)
            exec(compile(block, "a page", "exec"), names)
            trainer = names.get("trainer")
            if isinstance(trainer, Trainer) and trainer not in trained:
                trainer.fit(MyLightningModule(), datamodule=MyDataModule())
    finally:
        L.Trainer = original  # type: ignore[misc]
    return len(trained)
