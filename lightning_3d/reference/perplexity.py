"""Perplexity from losses that were computed anyway."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class Perplexity(Metric):
    """The exponential of the mean cross-entropy per token, over all batches and processes.

    ``torchmetrics.text.Perplexity`` takes logits and computes a second softmax over them; this one takes the loss.
    Its states are sums, so that processes with unlike numbers of tokens are weighed rightly.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: Tensor | int) -> None:
        """Takes the mean cross-entropy (0-dim) of a batch and the number of tokens it is the mean of."""
        self.total += loss.detach().to(self.total.dtype) * tokens
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Returns the perplexity as a 0-dim tensor."""
        return (self.total / self.tokens).exp()
