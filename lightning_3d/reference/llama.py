"""A Llama-style decoder, written from the papers.

Touvron et al. 2023 (the whole), Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary positions), Shazeer 2020
(SwiGLU), Ainslie et al. 2023 (grouped-query attention).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.reference.layers import check_divides, check_length, initialise


class Llama(nn.Module):
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward layer.
        num_layers: Number of blocks.
        num_heads: Query heads per block; divides ``hidden_size`` into heads of an even size.
        num_kv_heads: Key and value heads per block; divides ``num_heads``. None means ``num_heads``.
        max_length: The longest sequence.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in each RMSNorm.
        tie_weights: Whether the head is the token embedding.
        initial_std: Deviation of the first weights.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None,
        max_length: int,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        tie_weights: bool = False,
        initial_std: float = 0.02,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("hidden_size", hidden_size, "num_heads", num_heads)
        check_divides("num_heads", num_heads, "num_kv_heads", kv_heads)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.rotary = Rotary(hidden_size // num_heads, rope_theta)
        blocks = [LlamaBlock(hidden_size, intermediate_size, num_heads, kv_heads, norm_eps) for _ in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, eps=norm_eps)
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
        x = self.token_embedding(input_ids)
        cos, sin = self.rotary(input_ids, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Rotary(nn.Module):
    """The angles of the rotary positions.

    They are computed anew in each forward pass, once for all blocks: a buffer would lose its precision with the
    module's ``.to(torch.bfloat16)``.

    Args:
        head_size: Features per head, d; even.
        theta: Base of the frequencies: pair i turns by theta^(-2i/d) per position.
    """

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        if head_size % 2:
            raise ValueError(
                f"hidden_size / num_heads = {head_size} is odd, but rotary positions turn features in pairs\n"
                f"  fix: choose num_heads so that hidden_size / num_heads is even"
            )
        self.head_size = head_size
        self.theta = theta

    def forward(self, input_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines for a sequence.

        Args:
            input_ids: [batch, length], which tells length and device.
            dtype: Precision of the model's activations.

        Returns:
            Two of [length, head_size / 2], in ``dtype`` but at least fp32.
        """
        dtype, device = torch.promote_types(dtype, torch.float32), input_ids.device
        exponents = torch.arange(0, self.head_size, 2, dtype=dtype, device=device) / self.head_size
        positions = torch.arange(input_ids.shape[1], dtype=dtype, device=device)
        angles = positions[:, None] * self.theta**-exponents
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns feature i together with feature i + d/2 by the angle of its position.

    Args:
        x: [batch, heads, length, d].
        cos: [length, d/2].
        sin: [length, d/2].

    Returns:
        x rotated, in its own dtype; the rotation itself runs in that of the angles.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention, then a feed-forward layer, each normalised on its way in and added to what came in."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.attention = GroupedQueryAttention(hidden_size, num_heads, num_kv_heads)
        self.feed_forward_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.feed_forward = SwiGLU(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape; cos and sin are those of :class:`Rotary`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class GroupedQueryAttention(nn.Module):
    """Causal attention in which num_heads / num_kv_heads query heads share one key and value head."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.grouped = num_kv_heads != num_heads
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape; cos and sin are those of :class:`Rotary`."""
        # [batch, heads, length, head size] each
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """A feed-forward layer whose inner features are gated by SiLU of a second projection."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, hidden] to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
