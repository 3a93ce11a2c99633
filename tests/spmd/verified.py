"""Modules to verify: one that anybody might bring, and some that are broken on purpose."""

from __future__ import annotations

import os
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 64, 8, 16


class LlamaModule(L.LightningModule):
    """A Hugging Face Llama with dropout in its attention, as its author would train it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class NoisyBlock(Block):
    """Adds noise from a generator that nobody has seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(super().forward(x))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


class CountingBlock(Block):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1e-3 * self.calls)


class Stacked(L.LightningModule):
    """Blocks between an embedding and a head.

    Args:
        kind: Class of the blocks.
    """

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = self.loss(self.head(x), batch[0])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def stacked() -> Stacked:
    return Stacked()


def noisy() -> Stacked:
    return Stacked(NoisyBlock)


def counting() -> Stacked:
    return Stacked(CountingBlock)


def tokens(samples: int = 32, batch: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size=batch)


def hang(rank: int, hanging: int | None) -> int:
    """A job in which one rank never ends."""
    if rank == hanging:
        time.sleep(600)
    return os.getpid()


def leave(rank: int, leaving: int) -> None:
    """A job from which one rank disappears, and for which another would wait."""
    if rank == leaving:
        os._exit(7)
    time.sleep(600)


class RankBlock(Block):
    """Computes something else on the ranks after the first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * int(os.environ["RANK"]))


class FailingBlock(Block):
    """Cannot compute on a second rank."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ["RANK"] == "1":
            raise RuntimeError("not on this rank")
        return super().forward(x)


def failing() -> Stacked:
    return Stacked(FailingBlock)


def of_rank() -> Stacked:
    return Stacked(RankBlock)


class Narrow(Stacked):
    """Takes its loss in fp32, whatever it computes in."""

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class OnlyFp32(Stacked):
    """Has a place where fp64 does not fit."""

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy((logits @ torch.eye(VOCABULARY, dtype=torch.float32)).flatten(0, 1), ids.flatten())


def narrow() -> Stacked:
    return Narrow()


def only_fp32() -> Stacked:
    return OnlyFp32()
