"""Models to cut over a tensor axis: nobody wrote them for it, and the sizes of the whole stand in their code.

Each builder returns a LightningModule whose step takes a tuple of tensors, and a function that makes such a tuple.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import (
    LENGTH,
    MODELS,
    VOCABULARY,
    Batch,
    Learner,
    NextToken,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Translation(NextToken):
    """Targets from sources, through an encoder and a decoder."""

    def loss(self, batch: Batch) -> Tensor:
        sources, targets = batch
        logits = self.model(input_ids=sources, decoder_input_ids=targets).logits[:, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets[:, 1:].flatten())


class Features(Learner):
    """Regression of fixed targets on whatever hidden states the model gives."""

    def loss(self, batch: Batch) -> Tensor:
        output = self.model(batch[0])
        hidden = output if isinstance(output, Tensor) else output.last_hidden_state
        targets = torch.linspace(-1, 1, hidden[0].numel(), dtype=hidden.dtype).view_as(hidden[0])
        return (hidden - targets).square().mean()


class PackedAttention(nn.Module):
    """Attention with one packed projection, as many small training scripts write it."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.width, self.heads, self.fused = width, heads, fused
        self.pack, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.size()
        parts = self.pack(x).split(self.width, dim=2)
        q, k, v = (part.view(batch, steps, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            mixed = scores.masked_fill(~self.causal[:steps, :steps], float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, steps, width))


class PackedBlock(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PackedAttention(width, heads, fused)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PackedGPT(nn.Module):
    """A GPT with hard-coded global sizes, packed q|k|v and a tied head."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(PackedBlock(width, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SwiGLU(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, width: int = 32, inner: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TorchTranslator(nn.Module):
    """torch's own nn.Transformer between embeddings and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.sources, self.targets = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(targets.size(1), dtype=self.head.weight.dtype)
        return self.head(self.transformer(self.sources(sources), self.targets(targets), tgt_mask=mask))


class TorchTranslation(NextToken):
    """Targets from sources, by position."""

    def loss(self, batch: Batch) -> Tensor:
        sources, targets = batch
        logits = self.model(sources, targets)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def _tokens(samples: int, generator: torch.Generator) -> Batch:
    return (torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator),)


def _pairs(samples: int, generator: torch.Generator) -> Batch:
    return _tokens(samples, generator) + _tokens(samples, generator)


def _images(samples: int, generator: torch.Generator) -> Batch:
    return (torch.randn(samples, 3, 16, 16, generator=generator),)


def _states(samples: int, generator: torch.Generator) -> Batch:
    return (torch.randn(samples, LENGTH, 32, generator=generator),)


def hf(name: str, **options: Any) -> nn.Module:
    import transformers

    config_name, model_name = name.split("/")
    model: nn.Module = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    return model


def _decoder(name: str, **options: Any) -> Callable[[], Learner]:
    return lambda: NextToken(hf(name, **{**SIZES, "max_position_embeddings": LENGTH, **options}))


def _gpt2(attention: str) -> Callable[[], Learner]:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    return lambda: NextToken(hf("GPT2Config/GPT2LMHeadModel", **sizes, attn_implementation=attention))


def _t5(name: str) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return hf(name, **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.1)


def _vit() -> Learner:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    model = hf("ViTConfig/ViTModel", **sizes, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    model.pooler = None
    return Features(model)


TENSOR_MODELS: dict[str, tuple[Callable[[], Learner], Callable[[int, torch.Generator], Batch]]] = {
    "HF Llama (GQA)": (_decoder("LlamaConfig/LlamaForCausalLM", num_key_value_heads=2, attention_dropout=0.1), _tokens),
    "HF Qwen3": (_decoder("Qwen3Config/Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8), _tokens),
    "HF Gemma": (_decoder("GemmaConfig/GemmaForCausalLM", num_key_value_heads=1, head_dim=8), _tokens),
    "HF GPT-2 (sdpa)": (_gpt2("sdpa"), _tokens),
    "HF GPT-2 (eager)": (_gpt2("eager"), _tokens),
    "HF BERT": MODELS["HF BERT"],
    "HF ViT": (_vit, _images),
    "HF T5 encoder": (lambda: Features(_t5("T5Config/T5EncoderModel")), _tokens),
    "HF T5": (lambda: Translation(_t5("T5Config/T5ForConditionalGeneration")), _pairs),
    "HF Mixtral": (
        _decoder(
            "MixtralConfig/MixtralForCausalLM",
            num_key_value_heads=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        ),
        _tokens,
    ),
    "HF Phi3": (_decoder("Phi3Config/Phi3ForCausalLM", num_key_value_heads=4, pad_token_id=0), _tokens),
    "HF GPT-NeoX": (_decoder("GPTNeoXConfig/GPTNeoXForCausalLM", hidden_dropout=0.1, use_cache=False), _tokens),
    "packed GPT (tied)": (lambda: NextToken(PackedGPT()), _tokens),
    "packed GPT, eager attention": (lambda: NextToken(PackedGPT(fused=False)), _tokens),
    "nn.TransformerEncoder": MODELS["nn.TransformerEncoder"],
    "nn.Transformer": (lambda: TorchTranslation(TorchTranslator()), _pairs),
    "SwiGLU": (lambda: Features(nn.Sequential(SwiGLU(), SwiGLU())), _states),
    "reference GPT": MODELS["reference GPT"],
    "reference Llama": MODELS["reference Llama"],
}
# Experts are regions of their own, outside of sequence parallelism.
WITH_EXPERTS = ("HF Mixtral",)
# Models that compute in fp32 inside, whatever precision is asked for: their norms, and Mixtral's routing.
FP32_INSIDE = ("HF Llama (GQA)", "HF Qwen3", "HF Gemma", "HF T5 encoder", "HF T5", "HF Mixtral", "HF Phi3")
