"""A small network whose tensor layouts are written down by hand, and its training on one device and on a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.shards.layout import Layout

# No number of ranks divides the vocabulary.
WIDTH, HEADS, VOCABULARY, HIDDEN = 16, 4, 31, 24
STEPS, MICROBATCHES, CLIP = 3, 2, 0.5

_BLOCK = {
    "attention.qkv.weight": Layout(0, (WIDTH,) * 3),
    "attention.qkv.bias": Layout(0, (WIDTH,) * 3),
    "attention.out.weight": Layout(1, (WIDTH,)),
    "mlp.gate_up": Layout(1, (HIDDEN,) * 2),
    "mlp.down.weight": Layout(1, (HIDDEN,)),
}
LAYOUTS: Mapping[str, Layout] = {
    "embedding.weight": Layout(0, (VOCABULARY,)),
    **{f"blocks.{index}.{name}": layout for index in range(2) for name, layout in _BLOCK.items()},
}
PARTIAL = tuple(f"blocks.{index}.attention.norm.weight" for index in range(2))


class Attention(nn.Module):
    """Packed q, k and v, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2)
        )
        q, k = self.norm(q), self.norm(k)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // HEADS)
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class GatedMLP(nn.Module):
    """Gate and up in one weight whose outputs lie along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(WIDTH, 2 * HIDDEN) / math.sqrt(WIDTH))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class CutBlock(nn.Module):
    """A block with a scalar parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), GatedMLP()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.mlp.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class CutNet(nn.Module):
    """Two blocks between an embedding and the head that is tied to it, and a list of weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(CutBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))])
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.embedding.weight.no_decay = True

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns the mean loss of predicting each token from those before."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gains[0] + self.gains[1])
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batches(data: int) -> list[list[list[Tensor]]]:
    """Returns tokens by step, micro-batch and data rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        [[torch.randint(VOCABULARY, (2, 7), generator=generator) for _ in range(data)] for _ in range(MICROBATCHES)]
        for _ in range(STEPS)
    ]


def train_whole(data: int, **options: Any) -> dict[str, Any]:
    """Returns losses, norms, gradients of the first step and parameters in the end, on one device."""
    net = CutNet().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, microbatches in enumerate(batches(data)):
        for parts in microbatches:
            loss = torch.stack([net.loss(tokens) for tokens in parts]).mean() / MICROBATCHES
            loss.backward()
            found["losses"].append(loss.item())
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        found["norms"].append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return found | {"parameters": {name: parameter.detach() for name, parameter in net.named_parameters()}}


def in_order(name: str, tensor: Tensor, ranks: int) -> Tensor:
    """Returns a whole tensor in its original order; packed ones are in the order of the ranks."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    layout = LAYOUTS.get(name)
    return whole.clone() if layout is None else layout.whole(whole.chunk(ranks, layout.dim))
