"""Models to prove equality on; nobody wrote them for parallelism, and the loss is the step's own.

Each builder returns a LightningModule whose step takes a tuple of tensors, and a function that makes such a tuple.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 96, 12
Batch = tuple[Tensor, ...]


class Learner(L.LightningModule):
    """Trains any model with AdamW: the plainest module that a user may write."""

    def __init__(self, model: nn.Module, lr: float = 3e-3) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class NextToken(Learner):
    """Next-token prediction around ids -> logits, in the logits' own precision but fp32 at least."""

    def logits(self, ids: Tensor) -> Tensor:
        output = self.model(ids)
        return output if isinstance(output, Tensor) else output.logits

    def loss(self, batch: Batch) -> Tensor:
        ids = batch[0]
        logits = self.logits(ids)[:, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), ids[:, 1:].flatten())


class MaskedToken(NextToken):
    """Masked-token prediction, the targets beside the ids."""

    def loss(self, batch: Batch) -> Tensor:
        ids, targets = batch
        logits = self.logits(ids)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


class Classifier(Learner):
    """Classification of whatever the model takes."""

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets)


class SequenceClassifier(nn.Module):
    """torch's own encoder between an embedding and a head."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(dim=1))


def conv_net() -> nn.Module:
    """Returns a small image classifier with batch normalisation and no stack of blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 5),
    )


def _ids(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)


def _tokens(samples: int, generator: torch.Generator) -> Batch:
    return (_ids(samples, generator),)


def _masked(samples: int, generator: torch.Generator) -> Batch:
    return _ids(samples, generator), _ids(samples, generator)


def _labelled(samples: int, generator: torch.Generator) -> Batch:
    return _ids(samples, generator), torch.randint(0, 5, (samples,), generator=generator)


def _images(samples: int, generator: torch.Generator) -> Batch:
    images = torch.randn(samples, 3, 8, 8, generator=generator)
    return images, torch.randint(0, 5, (samples,), generator=generator)


def _reference_gpt() -> Learner:
    from lightning_3d.reference.gpt import GPT

    return NextToken(
        GPT(vocab_size=VOCABULARY, hidden_size=32, num_layers=3, num_heads=4, max_length=LENGTH, dropout=0.1)
    )


def _reference_llama() -> Learner:
    from lightning_3d.reference.llama import Llama

    return NextToken(
        Llama(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            max_length=LENGTH,
        )
    )


def _hf_llama() -> Learner:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
    )
    return NextToken(LlamaForCausalLM(config))


def _hf_gpt2() -> Learner:
    from transformers import GPT2Config, GPT2LMHeadModel

    return NextToken(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH))
    )


def _hf_bert() -> Learner:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
    )
    return MaskedToken(BertForMaskedLM(config))


MODELS: dict[str, tuple[Callable[[], Learner], Callable[[int, torch.Generator], Batch]]] = {
    "reference GPT": (_reference_gpt, _tokens),
    "reference Llama": (_reference_llama, _tokens),
    "HF Llama": (_hf_llama, _tokens),
    "HF GPT-2 (tied)": (_hf_gpt2, _tokens),
    "HF BERT": (_hf_bert, _masked),
    "nn.TransformerEncoder": (lambda: Classifier(SequenceClassifier()), _labelled),
    "ConvNet with BatchNorm": (lambda: Classifier(conv_net()), _images),
}
