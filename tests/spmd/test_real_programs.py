"""Programs that nobody wrote for a mesh, as they are but for the strategy: demos of Lightning, a model of Hugging Face.

Each is compared with one device that sees the same samples in each optimizer step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer, WikiText2
from lightning.pytorch.demos.boring_classes import BoringModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lightning_3d import Mesh3DStrategy
from lightning_3d.errors import Lightning3DError
from tests.features.modules import metrics, weights
from tests.spmd.fits import QUIET
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(300)]

_TEXT = Path(__file__).parents[2] / "LICENSE"
_WORDS = 1000
_SECONDS = 240


def assert_close(found: dict[str, Any], expected: dict[str, Any], close: float) -> None:
    # Lightning keeps what is logged in fp32.
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=max(close, 1e-6))
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=close, atol=close, msg=name)


def seen(trainer: L.Trainer) -> dict[str, Any]:
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


# ---- lightning.pytorch.demos ----


def transformer(rank: int, world: int, directory: Path, **strategy: Any) -> dict[str, Any]:
    """Trains on a text in the place where the demo would put the one that it downloads."""
    os.chdir(directory)
    L.seed_everything(7, verbose=False)
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4, "precision": "64-true"}
    trainer = L.Trainer(**QUIET, **options, devices=world, strategy=Mesh3DStrategy(**strategy))
    # On one device its batches of one sample are those of all data ranks together.
    loaders = DataLoader(WikiText2(), batch_size=2) if world == 1 else None
    trainer.fit(LightningTransformer(vocab_size=_WORDS), loaders)
    return seen(trainer)


def test_the_transformer_of_lightning(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text(_TEXT.read_text())
    (one,) = run_spmd(transformer, 1, tmp_path, num_microbatches=2, timeout=_SECONDS)
    for found in run_spmd(transformer, 4, tmp_path, tensor_parallel_size=2, tensor_random="exact", timeout=_SECONDS):
        assert_close(found, one, 1e-10)


def boring(rank: int, world: int, **strategy: Any) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    mesh = {"strategy": Mesh3DStrategy(**strategy), "devices": world} if world > 1 else {"accumulate_grad_batches": 2}
    trainer = L.Trainer(**QUIET, **mesh, max_epochs=2, limit_train_batches=8 // world, limit_val_batches=4 // world)
    trainer.fit(BoringModel())
    return seen(trainer)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_boring_model_on_data_ranks(zero_stage: int) -> None:
    (one,) = run_spmd(boring, 1)
    for found in run_spmd(boring, 2, zero_stage=zero_stage, timeout=_SECONDS):
        assert_close(found, one, 1e-6)


def refused(rank: int, world: int, **strategy: Any) -> str:
    with pytest.raises(Lightning3DError) as error:
        boring(rank, world, **strategy)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ({"tensor_parallel_size": 2}, "no parameter of the model can be cut"),
        ({"pipeline_parallel_size": 2}, "the module has no list of two or more layers"),
    ],
    ids=["tensor", "pipeline"],
)
def test_the_boring_model_has_nothing_to_cut(strategy: dict[str, Any], text: str) -> None:
    for told in run_spmd(refused, 2, timeout=_SECONDS, **strategy):
        assert text in told


# ---- Hugging Face ----


class CausalLanguageModel(L.LightningModule):
    """What most people write around a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, n_embd=32, n_layer=4, n_head=4, n_positions=32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def collated(samples: int, batch_size: int) -> DataLoader[Any]:
    """Lines of a text, padded by Hugging Face's collator, to one length, as dropout masks depend on shapes."""
    lines = [line for line in _TEXT.read_text().splitlines() if len(line.split()) > 4][:samples]
    words = dict.fromkeys(word for line in lines for word in line.split())
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")
    data = [tokenizer(line, truncation=True, max_length=24) for line in lines]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=24)
    return DataLoader(data, batch_size, collate_fn=collator)


def language_model(rank: int, world: int, batch_size: int, **strategy: Any) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(**QUIET, devices=world, strategy=Mesh3DStrategy(**strategy), max_epochs=1, precision="64-true")
    trainer.fit(CausalLanguageModel(), collated(24, batch_size), collated(8, batch_size))
    return seen(trainer)


def test_a_model_of_hugging_face_with_its_own_batches() -> None:
    (one,) = run_spmd(language_model, 1, 8, num_microbatches=4, timeout=_SECONDS)
    cube = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 2, "tensor_random": "exact"}
    for found in run_spmd(language_model, 8, 4, timeout=_SECONDS, **cube):
        # It computes its loss in fp32.
        assert_close(found, one, 1e-5)
