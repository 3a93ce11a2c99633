"""Mixtures of experts in the forms that people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_3d.parallel.tensor.regions.trial import CallSample

HIDDEN = 32


class Expert(nn.Module):
    def __init__(self, inner: int, bias: bool, drop: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, inner)
        self.w3 = nn.Linear(HIDDEN, inner, bias=False)
        self.w2 = nn.Linear(inner, HIDDEN, bias=bias)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.w2(self.drop(F.silu(self.w1(x)) * self.w3(x)))
        return found


class Mixture(nn.Module):
    """Router and experts in one module; a loop over experts that adds by index; returns what it chose by.

    Args:
        inner: Width of an expert.
        bias: The last layer of an expert has one.
        softmax: Over the output.
        shared: There is an expert for all tokens, twice as wide.
        balance: In training there is a loss for even use, too.
        width: The code counts on this width of an expert's inside.
        drop: Rate of dropout inside experts.
    """

    def __init__(
        self,
        inner: int = 48,
        *,
        bias: bool = False,
        softmax: bool = False,
        shared: bool = False,
        balance: bool = False,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(Expert(inner, bias, drop) for _ in range(4))
        self.shared = Expert(2 * inner, bias, drop) if shared else None
        self.softmax, self.balance = softmax, balance

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        if self.shared is not None:
            out = out + self.shared(tokens)
        out = out.softmax(-1) if self.softmax else out
        balance = (logits.softmax(-1).mean(0).square().sum(),) if self.balance and self.training else ()
        return out.view_as(x), logits, *balance


class Stacked(nn.Module):
    """Experts in one weight, which are told who goes where; gate and up lie side by side or in turn."""

    def __init__(self, inner: int = 48, *, in_turn: bool = False, sized: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 2 * inner, HIDDEN) / 6)
        self.gate_up_bias = nn.Parameter(torch.randn(4, 2 * inner))
        self.down = nn.Parameter(torch.randn(4, HIDDEN, inner) / 6)
        self.in_turn, self.sized, self.writes, self.inner = in_turn, sized, writes, inner

    def forward(self, tokens: Tensor, chosen: Tensor, *, weights: Tensor) -> Tensor:
        if self.writes:
            tokens *= 2
        packed = torch.einsum("nh,ekh->nek", tokens, self.gate_up) + self.gate_up_bias
        gate, up = (packed[..., ::2], packed[..., 1::2]) if self.in_turn else packed.chunk(2, -1)
        inside = F.silu(gate) * up
        if self.sized:
            inside = inside.view(-1, 4, self.inner)
        each = torch.einsum("nek,ehk->neh", inside, self.down)
        rows = each[torch.arange(len(tokens))[:, None], chosen]
        return (rows * weights[..., None]).sum(1)


class Around(nn.Module):
    """A layer before and one after a mixture, and a loss of all that it returns."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.mixture = mixture
        self.last = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, *others = self.mixture(self.first(x))
        extra = sum((other.square().mean() for other in others), torch.zeros(()))
        return self.last(out).square().mean() + extra


def routed(tokens: int = 10, hidden: int = HIDDEN, choices: int = 2, device: str = "cpu") -> CallSample:
    """A call of experts that are told who goes where."""
    chosen = torch.empty(tokens, choices, dtype=torch.int64, device=device)
    return CallSample(args=(torch.empty(tokens, hidden, device=device), chosen, torch.empty(tokens, choices)))


def mixtral(**options: Any) -> MixtralForCausalLM:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=16, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **options,
        )
    )  # fmt: skip


def qwen(**options: Any) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=16, hidden_size=HIDDEN, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, head_dim=8, **options,
        )
    )  # fmt: skip
