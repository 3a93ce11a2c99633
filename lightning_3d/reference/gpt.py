"""GPT-2, written from the papers: Radford et al. 2018 and 2019."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.reference.layers import check_divides, check_length, initialise


class GPT(nn.Module):
    """A decoder with learned positions, normalisation before each branch, and GELU.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads per block; divides ``hidden_size``.
        max_length: The longest sequence, which is the number of learned positions.
        intermediate_size: Width inside the feed-forward layer; None means 4 × ``hidden_size``.
        dropout: Probability of dropping an embedding, an attention weight or a branch's output.
        tie_weights: Whether the head is the token embedding.
        norm_eps: Added to the variance in each LayerNorm.
        initial_std: Deviation of the first weights.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        max_length: int,
        intermediate_size: int | None = None,
        dropout: float = 0.0,
        tie_weights: bool = True,
        norm_eps: float = 1e-5,
        initial_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_divides("hidden_size", hidden_size, "num_heads", num_heads)
        inner = intermediate_size or 4 * hidden_size
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(max_length, hidden_size)
        self.dropout = nn.Dropout(dropout)
        blocks = [GPTBlock(hidden_size, num_heads, inner, dropout, norm_eps) for _ in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        ends = [end for block in blocks for end in (block.attention.output, block.feed_forward.down)]
        initialise(self, initial_std, ends, num_layers)
        if tie_weights:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Predicts the token after each token.

        Args:
            input_ids: [batch, length] token ids.

        Returns:
            [batch, length, vocab_size] logits.
        """
        check_length(input_ids, self.max_length)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPTBlock(nn.Module):
    """Attention, then a feed-forward layer, each normalised on its way in and added to what came in."""

    def __init__(self, hidden_size: int, num_heads: int, inner: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.attention = CausalAttention(hidden_size, num_heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.feed_forward = FeedForward(hidden_size, inner, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class CausalAttention(nn.Module):
    """Multi-head attention of each token to itself and those before it; queries, keys and values in one product."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_dropout = dropout
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape."""
        # [batch, heads, length, head size] each
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.dropout(self.output(mixed.transpose(1, 2).flatten(-2)))
        return out


class FeedForward(nn.Module):
    """Two linear layers with GELU between, in the tanh form of Hendrycks & Gimpel 2016 that GPT-2 uses."""

    def __init__(self, hidden_size: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, inner)
        self.down = nn.Linear(inner, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape."""
        out: Tensor = self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))
        return out
