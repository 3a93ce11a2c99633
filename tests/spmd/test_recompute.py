"""What blocks compute again in backward is what they have computed: the same loss with and without, to the bit."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForTokenClassification

from tests.spmd.fits import loader, trainer
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(200)]


class Tagger(L.LightningModule):
    """Padded batches, whose masks are made anew in each step, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        self.model = BertForTokenClassification(BertConfig(vocab_size=50, num_labels=4, **sizes))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def padded(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 50, (3, 6 + step), generator=generator)
    mask = torch.arange(6 + step) < torch.tensor([[3], [5], [6]])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": (ids % 4).masked_fill(~mask, -100)}


def losses(rank: int, world: int) -> list[list[float]]:
    found = []
    for kind in ("none", "full", "selective"):
        L.seed_everything(3, verbose=False)
        module = Tagger()
        run = trainer(
            world,
            strategy={"activation_checkpointing": kind, "zero_stage": 3},
            precision="bf16-mixed",
            max_epochs=1,
            use_distributed_sampler=False,
        )
        run.fit(module, loader(padded(rank, step) for step in range(4)))
        found.append(module.losses)
    return found


def test_reduced_precision_and_padding_are_recomputed_alike() -> None:
    for none, full, selective in run_spmd(losses, 2, timeout=180):
        assert len(set(none)) == 4
        assert full == none
        assert selective == none
