from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lightning_3d.reference import GPT, LanguageModel, Llama, warmup_cosine
from lightning_3d.reference.hugging_face import HuggingFaceModel
from lightning_3d.reference.language_model import next_token_loss, next_tokens
from lightning_3d.reference.perplexity import Perplexity
from tests.unit.reference.conftest import DataFactory

GPT_BUILDER = functools.partial(GPT, 257, hidden_size=16, num_layers=1, num_heads=2, max_length=63)
LLAMA_BUILDER = functools.partial(
    Llama, 257, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_length=63
)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Fixed(nn.Module):
    """Gives the same logits whatever it is asked, and remembers how it was asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.asked: list[Tensor | None] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        self.asked = [input_ids, attention_mask]
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def run(module: L.LightningModule, data: L.LightningDataModule, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, datamodule=data)
    return trainer


@pytest.mark.parametrize("builder", [GPT_BUILDER, LLAMA_BUILDER])
def test_the_loss_falls(make_data: DataFactory, builder: functools.partial[nn.Module]) -> None:
    torch.manual_seed(0)
    module = LanguageModel(builder, ADAMW, functools.partial(warmup_cosine, warmup_steps=3))
    losses = []
    step = module.training_step
    module.training_step = lambda *args: losses.append(step(*args)) or losses[-1]  # type: ignore[method-assign,func-returns-value]
    trainer = run(module, make_data(), max_steps=30)
    assert losses[0].item() == pytest.approx(5.55, abs=0.1)
    assert losses[-1].item() < 3
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(losses[-1].item())
    assert trainer.callback_metrics["train_tokens"].item() == 8 * 63


def test_validation_and_test_are_means_over_tokens(make_data: DataFactory) -> None:
    data = make_data(batch_size=3)
    module = LanguageModel(Fixed(torch.linspace(-1, 1, 257)), ADAMW)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    for stage, evaluate in (("val", trainer.validate), ("test", trainer.test)):
        logged = evaluate(module, datamodule=data, verbose=False)[0]
        assert len(data.val_dataloader()) == 2
        rows = torch.stack(list(getattr(data, f"{stage}_dataloader")().dataset))
        expected = nn.functional.cross_entropy(
            torch.linspace(-1, 1, 257).expand(rows[:, 1:].numel(), -1), rows[:, 1:].flatten()
        )
        assert logged[f"{stage}_loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert logged[f"{stage}_perplexity"] == pytest.approx(expected.exp().item(), rel=1e-6)


def test_a_batch_of_token_ids_is_shifted_by_one() -> None:
    batch = torch.arange(8).view(2, 4)
    asked = next_tokens(batch, -100)
    assert asked.inputs.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert asked.targets.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert (asked.mask, asked.weighted) == (None, False)
    assert not next_tokens({"input_ids": batch}, -100).weighted


def test_labels_and_masks_choose_the_targets() -> None:
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.where(ids == 1, -100, ids)
    asked = next_tokens({"input_ids": ids, "attention_mask": mask, "labels": labels}, -100)
    assert asked.targets.tolist() == [[-100, 2, 3], [5, -100, -100]]
    assert asked.mask is not None
    assert asked.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert asked.weighted


@pytest.mark.parametrize(("batch", "found"), [([1, 2], "list"), ({"ids": 1}, r"\['ids'\]"), (None, "NoneType")])
def test_other_batches_are_refused(batch: object, found: str) -> None:
    with pytest.raises(TypeError, match=f"got a batch of {found}\n  valid: a tensor of token ids"):
        next_tokens(batch, -100)


def test_labels_bring_the_weight_of_the_batch_along() -> None:
    model = Fixed(torch.randn(11))
    module = LanguageModel(model, ADAMW)
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    module.trainer = L.Trainer(accelerator="cpu", logger=False)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    out = module.training_step({"input_ids": ids, "attention_mask": mask}, 0)
    expected = -(model.logits.log_softmax(0)[torch.tensor([1, 2, 3, 5])]).mean()
    assert isinstance(out, dict)
    assert out["loss_weight"].item() == 4
    torch.testing.assert_close(out["loss"], expected)
    assert torch.equal(model.asked[1], mask[:, :-1])  # type: ignore[arg-type]
    assert isinstance(module.training_step(ids, 0), Tensor)


def test_a_model_without_a_mask_is_not_given_one() -> None:
    ids, mask = torch.arange(8).view(2, 4), torch.ones(2, 4)
    module = LanguageModel(GPT_BUILDER(), ADAMW).eval()
    assert torch.equal(module(ids, mask), module(ids))


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_loss_is_computed_in_fp32_at_least(given: torch.dtype, computed: torch.dtype) -> None:
    logits, targets = torch.randn(2, 3, 5).to(given), torch.tensor([[1, 2, -100], [0, -100, 4]])
    loss, tokens = next_token_loss(logits, targets, -100)
    assert loss.dtype == computed
    assert tokens.item() == 4
    expected = nn.functional.cross_entropy(logits.to(computed).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)


def test_no_token_that_counts_is_no_loss() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss, tokens = next_token_loss(logits, torch.full((1, 2), -100), -100)
    loss.backward()
    assert (loss.item(), tokens.item()) == (0, 0)
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_perplexity_weighs_by_tokens_and_sums_over_processes() -> None:
    one, other = Perplexity(), Perplexity()
    one.update(torch.tensor(1.0), 3)
    other.update(torch.tensor(2.0), torch.tensor(1))
    one.merge_state(other)
    assert one.compute().item() == pytest.approx(math.exp(5 / 4))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-true", torch.float32), ("32-true", torch.float32), ("64-true", torch.float64)]
)
def test_perplexity_is_summed_in_fp32_at_least(make_data: DataFactory, precision: Any, dtype: torch.dtype) -> None:
    module = LanguageModel(GPT_BUILDER, ADAMW)
    run(module, make_data(), max_steps=1, precision=precision, val_check_interval=1)
    assert module.val_perplexity.total.dtype == module.val_perplexity.tokens.dtype == dtype


def test_the_model_is_built_in_configure_model_and_once() -> None:
    module = LanguageModel(GPT_BUILDER, ADAMW)
    assert not list(module.parameters())
    with torch.device("meta"):
        module.configure_model()
    built = module.model
    module.configure_model()
    assert module.model is built
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_checkpoint_is_plain_and_loads_into_a_new_module(make_data: DataFactory, tmp_path: Path) -> None:
    module = LanguageModel(GPT_BUILDER, ADAMW, lr_scaling="sqrt", base_batch_size=8)
    trainer = run(module, make_data(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {
        "decay_embeddings": True,
        "ignore_index": -100,
        "lr_scaling": "sqrt",
        "base_batch_size": 8,
    }
    loaded = LanguageModel.load_from_checkpoint(
        tmp_path / "model.ckpt", model=GPT_BUILDER(), optimizer=ADAMW, weights_only=True
    )
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


def test_the_scheduler_gets_the_trainers_steps(make_data: DataFactory) -> None:
    one_cycle = functools.partial(OneCycleLR, max_lr=1e-2)
    trainer = run(LanguageModel(GPT_BUILDER, ADAMW, one_cycle), make_data(), max_epochs=1)
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 6
    trainer = run(LanguageModel(GPT_BUILDER, ADAMW, warmup_cosine), make_data(), max_steps=4)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize("kind", [LanguageModel, HuggingFaceModel])
def test_a_scheduler_needs_an_end(make_data: DataFactory, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"training has no end\n  fix: trainer\.max_steps"):
        run(kind(GPT_BUILDER, ADAMW, warmup_cosine), make_data(), max_epochs=-1)


def test_the_learning_rate_follows_the_batch_and_says_so(
    make_data: DataFactory, caplog: pytest.LogCaptureFixture
) -> None:
    module = LanguageModel(GPT_BUILDER, ADAMW, lr_scaling="linear", base_batch_size=64)
    with caplog.at_level(logging.INFO):
        trainer = run(module, make_data(), max_steps=1, accumulate_grad_batches=2)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.0025, 0.0025]
    assert "lr_scaling=linear: learning rate 0.01 x 0.25 = 0.0025 for 16 samples per step" in caplog.text


def test_bad_options_are_said_early(make_data: DataFactory) -> None:
    with pytest.raises(ValueError, match=r"lr_scaling='log' is unknown\n  valid: none, linear, sqrt"):
        LanguageModel(GPT_BUILDER, ADAMW, lr_scaling="log")
    small = functools.partial(GPT, 256, hidden_size=16, num_layers=1, num_heads=2, max_length=63)
    with pytest.raises(ValueError, match="the data has 257 token ids, the model's vocab_size is 256"):
        run(LanguageModel(small, ADAMW), make_data(), max_steps=1)
