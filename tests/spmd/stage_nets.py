"""Small modules that do between their blocks what is hard to cut."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BLOCKS = 8, 4


class Block(nn.Module):
    """A residual block; writes to its input, as frugal code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, h: Tensor) -> Tensor:
        out = self.drop(torch.tanh(self.linear(self.norm(h))))
        out += h
        return out


class Tangled(L.LightningModule):
    """Parameters of its own, a tied head that is a function, writes in place, values that skip stages, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 12, WIDTH))
        self.scale = nn.Parameter(torch.ones(BLOCKS))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.left: list[Tensor] = []
        self.blocks[1].linear.register_forward_hook(self.keep)
        self.logged: dict[str, Any] = {}

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.left.append(output)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logged[name] = value

    def forward(self, ids: Tensor) -> Tensor:
        self.left.clear()
        h = self.embed(ids) * WIDTH**0.5
        h += self.position[:, : ids.shape[1]]
        h = F.dropout(h, 0.1, self.training)
        first = h.contiguous()
        noise = torch.randn(h.shape, dtype=h.dtype)
        for index, block in enumerate(self.blocks):
            h = block(h) * self.scale[index]
            h[:, 0] += first[:, 0]
            h.mul_(0.9)
        self.log("norm", first.norm())
        h = self.norm(h + 0.1 * noise) + self.left[0]
        return F.linear(h, self.embed.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch)
        with torch.no_grad():
            self.seen += batch.float().mean()
        if logits.detach().abs().max() > 1e6:
            raise ValueError("too large")
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def tangled() -> tuple[Tangled, Tensor]:
    torch.manual_seed(0)
    return Tangled().double(), torch.randint(0, 16, (3, 6), generator=torch.Generator().manual_seed(1))
