"""Models of eight blocks to cut into stages: nobody wrote them for pipelines, and their steps are plain.

Each builder returns a LightningModule whose step takes a tuple of tensors, and a function that makes such a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import LENGTH, VOCABULARY, Batch, Classifier, Learner, MaskedToken, NextToken
from tests.parity.tensor_models import SIZES, Translation, hf

BLOCKS = 8
_DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": BLOCKS, "max_position_embeddings": LENGTH}


class Padded(Learner):
    """Classification of padded sequences by a Hugging Face model that computes the loss itself."""

    def loss(self, batch: Batch) -> Tensor:
        ids, mask, labels = batch
        loss: Tensor = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss


class Pictures(Learner):
    """Classification of images by a Hugging Face model."""

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        logits: Tensor = self.model(pixel_values=images).logits
        return F.cross_entropy(logits, labels)


class Routed(NextToken):
    """Next-token prediction with a loss that balances experts: router logits come out of every block."""

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0], output_router_logits=True).loss
        return loss


class Residual(nn.Module):
    """A block of a residual network, with batch normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride=stride) if (inputs, stride) != (outputs, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResidualNet(nn.Module):
    """Four groups of two blocks each, as image models name them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.layer3 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer4 = nn.Sequential(Residual(8, 8, 2), Residual(8, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(F.relu(self.stem(x))))))
        return self.head(x.mean(dim=(2, 3)))


class Skipping(nn.Module):
    """A deep net whose second half takes what the first has left, as a U-Net does; the input goes on beside all."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.gains = nn.Parameter(torch.ones(BLOCKS))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(BLOCKS)
        )
        self.leave = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.enter(x)
        left: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            if index >= BLOCKS // 2:
                h = h + left.pop()
            h = block(h) * self.gains[index] + start
            if index < BLOCKS // 2:
                left.append(h)
        return self.leave(h)


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (12, *[16] * (BLOCKS - 1)):
        layers += [nn.Linear(width, 16), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(16, 5))


def _ids(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)


def _labels(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (samples,), generator=generator)


def _tokens(samples: int, generator: torch.Generator) -> Batch:
    return (_ids(samples, generator),)


def _pairs(samples: int, generator: torch.Generator) -> Batch:
    return _ids(samples, generator), _ids(samples, generator)


def _labelled(samples: int, generator: torch.Generator) -> Batch:
    return _ids(samples, generator), _labels(samples, generator)


def _padded(samples: int, generator: torch.Generator) -> Batch:
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return _ids(samples, generator) * mask, mask, _labels(samples, generator)


def _images(samples: int, generator: torch.Generator) -> Batch:
    return torch.randn(samples, 3, 16, 16, generator=generator), _labels(samples, generator)


def _vectors(samples: int, generator: torch.Generator) -> Batch:
    return torch.randn(samples, 12, generator=generator), _labels(samples, generator)


def _llama() -> Learner:
    return NextToken(
        hf("LlamaConfig/LlamaForCausalLM", **{**_DEEP, "num_key_value_heads": 2, "attention_dropout": 0.1})
    )


def _gpt2() -> Learner:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": BLOCKS, "n_head": 4, "n_positions": LENGTH}
    return NextToken(hf("GPT2Config/GPT2LMHeadModel", **sizes, bos_token_id=None, eos_token_id=None))


def _vit() -> Learner:
    sizes = {key: value for key, value in _DEEP.items() if key not in ("vocab_size", "max_position_embeddings")}
    options = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1, "num_labels": 5}
    return Pictures(hf("ViTConfig/ViTForImageClassification", **sizes, **options))


def _t5() -> Learner:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": BLOCKS // 2, "num_heads": 4}
    return Translation(hf("T5Config/T5ForConditionalGeneration", **sizes, dropout_rate=0.1))


def _mixtral() -> Learner:
    options = {
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    }
    return Routed(hf("MixtralConfig/MixtralForCausalLM", **_DEEP, **options))


def _encoder() -> Learner:
    from tests.parity.models import SequenceClassifier

    return Classifier(SequenceClassifier(layers=BLOCKS))


def _reference_gpt() -> Learner:
    from lightning_3d.reference.gpt import GPT

    return NextToken(
        GPT(vocab_size=VOCABULARY, hidden_size=32, num_layers=BLOCKS, num_heads=4, max_length=LENGTH, dropout=0.1)
    )


TRANSFORMERS: dict[str, tuple[Callable[[], Learner], Callable[[int, torch.Generator], Batch]]] = {
    "HF Llama, 8 blocks": (_llama, _tokens),
    "HF GPT-2 (tied), 8 blocks": (_gpt2, _tokens),
    "HF BERT for masked tokens, 8 blocks": (lambda: MaskedToken(hf("BertConfig/BertForMaskedLM", **_DEEP)), _pairs),
    "HF BERT classifier, padded, 8 blocks": (
        lambda: Padded(hf("BertConfig/BertForSequenceClassification", **_DEEP, num_labels=5)),
        _padded,
    ),
    "HF ViT, 8 blocks": (_vit, _images),
    "HF T5, 4 + 4 blocks": (_t5, _pairs),
    "HF Mixtral, router losses, 8 blocks": (_mixtral, _tokens),
    "nn.TransformerEncoder, 8 blocks": (_encoder, _labelled),
    "reference GPT, 8 blocks": (_reference_gpt, _tokens),
}
PIPELINE_MODELS: dict[str, tuple[Callable[[], Learner], Callable[[int, torch.Generator], Batch]]] = {
    **TRANSFORMERS,
    "residual network, 4 groups of 2": (lambda: Classifier(ResidualNet()), _images),
    "U-Net skips, 8 blocks": (lambda: Classifier(Skipping()), _vectors),
    "nn.Sequential MLP": (lambda: Classifier(_mlp()), _vectors),
}
# Models that compute in fp32 inside, whatever precision is asked for.
DEEP_FP32_INSIDE = ("HF Llama, 8 blocks", "HF T5, 4 + 4 blocks")
