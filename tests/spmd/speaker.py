"""A small language model with what checkpoints must keep: a tie, statistics, groups in another order than its own."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 8, 12


def words(count: int) -> list[tuple[Tensor]]:
    """Batches of four sentences."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(0, WORDS, (4, 5), generator=generator),) for _ in range(count)]


class Block(nn.Module):
    """One of the blocks, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.up(hidden))
        if self.training:
            self.largest.add_(1)
        return hidden + self.down(inner)


class Speaker(L.LightningModule):
    """A language model whose table is its head, on the first stage and on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []
        self.build()

    def build(self) -> None:
        """Makes all parts."""
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (words,) = batch
        hidden = self.table(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), words.roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        # In another order than the module's.
        parameters = [*self.parameters()][::-1]
        groups = [{"params": parameters[:7], "weight_decay": 0.3}, {"params": parameters[7:]}]
        optimizer = torch.optim.AdamW(groups, lr=3e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooks = [*checkpoint["state_dict"]]
        checkpoint["doubled"] = {name: value * 2 for name, value in self.named_parameters()}


class Late(Speaker):
    """The same, built where the mesh is known, and only once."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.built = False

    def configure_model(self) -> None:
        if not self.built:
            self.build()
            self.built = True

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx), sync_dist=True)
