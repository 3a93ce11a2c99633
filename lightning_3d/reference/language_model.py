"""A LightningModule that trains any ``input_ids -> logits`` module to predict the next token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_3d.reference.optim import LR_SCALINGS, decay_groups, lr_factor, with_schedule
from lightning_3d.reference.perplexity import Perplexity

TokenBatch: TypeAlias = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTokens:
    """What a batch asks a model to predict.

    Attributes:
        inputs: [batch, length] token ids.
        targets: [batch, length] the token after each.
        mask: [batch, length] 0 where the input is padding, or None.
        weighted: Whether some targets may not count.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None
    weighted: bool


def next_tokens(batch: object, ignore_index: int) -> NextTokens:
    """Splits a batch of length + 1 tokens into inputs and the tokens that follow them.

    Args:
        batch: [batch, length + 1] token ids; or a mapping with these as ``input_ids`` and, in the same shape,
            ``labels`` (aligned with ``input_ids``, as Hugging Face has them) and ``attention_mask``.
        ignore_index: The label of a token that does not count.

    Raises:
        TypeError: If the batch is neither a tensor nor a mapping with ``input_ids``.
    """
    if isinstance(batch, Tensor):
        return NextTokens(inputs=batch[:, :-1], targets=batch[:, 1:], mask=None, weighted=False)
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(
            f"LanguageModel got a batch of {found}\n"
            "  valid: a tensor of token ids, or a mapping with 'input_ids' and optional 'labels', 'attention_mask'"
        )
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch.get("labels", ids)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, ignore_index)
    return NextTokens(
        inputs=ids[:, :-1],
        targets=labels[:, 1:],
        mask=None if mask is None else mask[:, :-1],
        weighted=mask is not None or "labels" in batch,
    )


def next_token_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Computes the mean cross-entropy per token, in fp32 or the logits' own precision if that is higher.

    Args:
        logits: [batch, length, vocab].
        targets: [batch, length].
        ignore_index: The target of a token that does not count.

    Returns:
        The mean over the tokens that count (0 if none does), and their number; both 0-dim.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum")
    tokens = (targets != ignore_index).sum()
    return total / tokens.clamp(min=1), tokens


class LanguageModel(L.LightningModule):
    """Next-token training around a decoder.

    Logs ``train_loss``, ``train_tokens`` (targets in the step's whole batch), ``val_loss``, ``val_perplexity``,
    ``test_loss`` and ``test_perplexity``.

    Args:
        model: A module ``input_ids -> logits``, or one whose output has ``.logits``; or a callable without arguments
            that builds it, which is then called in ``configure_model``, so that a strategy may build it on the
            meta device.
        optimizer: Builds the optimizer from parameter groups, e.g. ``functools.partial(torch.optim.AdamW, lr=3e-4)``.
        scheduler: Builds a schedule, stepped after each optimizer step, from the optimizer. If it takes
            ``total_steps`` and was not given it, it gets the Trainer's estimate.
        decay_embeddings: Whether embedding tables take part in weight decay.
        ignore_index: The label of a token that does not count in the loss.
        lr_scaling: "none", "linear" or "sqrt": how the learning rate follows the samples per optimizer step.
        base_batch_size: Samples per optimizer step for which the learning rate was chosen.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        decay_embeddings: bool = True,
        ignore_index: int = -100,
        lr_scaling: str = "none",
        base_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if lr_scaling not in LR_SCALINGS:
            raise ValueError(f"lr_scaling={lr_scaling!r} is unknown\n  valid: {', '.join(LR_SCALINGS)}")
        # By name, so that a checkpoint never holds a module or a builder.
        self.save_hyperparameters("decay_embeddings", "ignore_index", "lr_scaling", "base_batch_size")
        self.model: nn.Module | None = model if isinstance(model, nn.Module) else None
        self.build_model = None if isinstance(model, nn.Module) else model
        self.build_optimizer = optimizer
        self.build_scheduler = scheduler
        self.decay_embeddings = decay_embeddings
        self.ignore_index = ignore_index
        self.lr_scaling = lr_scaling
        self.base_batch_size = base_batch_size
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()

    def configure_model(self) -> None:
        """Builds the model, once, if a builder was given."""
        if self.model is None and self.build_model is not None:
            self.model = self.build_model()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Predicts the token after each token.

        Args:
            input_ids: [batch, length] token ids.
            attention_mask: [batch, length], 0 where the input is padding. Models that take no mask do without: in a
                causal model, padding on the right changes nothing before it.

        Returns:
            [batch, length, vocab] logits.
        """
        assert self.model is not None, "configure_model() builds the model and has not run yet"
        masked = attention_mask is not None and "attention_mask" in inspect.signature(self.model.forward).parameters
        output = self.model(input_ids, attention_mask=attention_mask) if masked else self.model(input_ids)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def on_fit_start(self) -> None:
        """Refuses text with more token ids than the model knows, which would fail in the middle of a lookup."""
        tokens = self._of_data("vocab_size")
        config = getattr(self.model, "config", None)
        known = getattr(self.model, "vocab_size", getattr(config, "vocab_size", None))
        if tokens is not None and known is not None and tokens > known:
            raise ValueError(
                f"the data has {tokens} token ids, the model's vocab_size is {known}\n"
                f"  fix: a vocab_size of at least {tokens} for the model"
            )

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Returns the mean loss per token; with its number of tokens where that may differ between batches."""
        asked, loss, tokens = self._predict(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(asked.inputs))
        self.log("train_tokens", tokens.to(loss.dtype), reduce_fx="sum", sync_dist=True, batch_size=len(asked.inputs))
        return {"loss": loss, "loss_weight": tokens} if asked.weighted else loss

    def on_validation_epoch_start(self) -> None:
        """Keeps the metric's sums in fp32 even when the module was cast to less."""
        self.val_perplexity.set_dtype(torch.promote_types(self._precision(), torch.float32))

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Returns the mean loss per token."""
        return self._evaluate(batch, "val", self.val_perplexity)

    def on_test_epoch_start(self) -> None:
        """Keeps the metric's sums in fp32 even when the module was cast to less."""
        self.test_perplexity.set_dtype(torch.promote_types(self._precision(), torch.float32))

    def test_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Returns the mean loss per token."""
        return self._evaluate(batch, "test", self.test_perplexity)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Builds the optimizer, scales its learning rate, and builds the schedule if there is one."""
        optimizer = self.build_optimizer(decay_groups(self, decay_embeddings=self.decay_embeddings))
        if self.lr_scaling != "none":
            self._scale_learning_rate(optimizer)
        return with_schedule(optimizer, self.build_scheduler, self)

    def _predict(self, batch: TokenBatch) -> tuple[NextTokens, Tensor, Tensor]:
        asked = next_tokens(batch, self.ignore_index)
        loss, tokens = next_token_loss(self(asked.inputs, asked.mask), asked.targets, self.ignore_index)
        return asked, loss, tokens

    def _evaluate(self, batch: TokenBatch, stage: str, perplexity: Perplexity) -> Tensor:
        asked, loss, tokens = self._predict(batch)
        perplexity.update(loss, tokens)
        # The weight in Lightning's mean over batches: the tokens, so that a short last batch counts for less.
        weight = int(tokens) if asked.weighted else asked.targets.numel()
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True, batch_size=weight)
        self.log(f"{stage}_perplexity", perplexity, batch_size=weight)
        return loss

    def _of_data(self, name: str) -> int | None:
        value = getattr(getattr(self.trainer, "datamodule", None), name, None)
        return value if isinstance(value, int) else None

    def _precision(self) -> torch.dtype:
        return self.dtype if isinstance(self.dtype, torch.dtype) else torch.float32

    def _scale_learning_rate(self, optimizer: Optimizer) -> None:
        batch = self._samples_per_step()
        factor = lr_factor(self.lr_scaling, batch, self.base_batch_size)
        for group in optimizer.param_groups:
            before, group["lr"] = group["lr"], group["lr"] * factor
        rank_zero_info(
            f"lr_scaling={self.lr_scaling}: learning rate {before:.4g} x {factor:.4g} = {before * factor:.4g}"
            f" for {batch} samples per step (base_batch_size={self.base_batch_size})"
        )

    def _samples_per_step(self) -> int:
        per_rank = self._of_data("batch_size")
        if per_rank is None:
            raise ValueError(
                f"lr_scaling={self.lr_scaling!r} reads the batch size from the data module, which has none\n"
                "  fix: a data module with an integer attribute batch_size, or lr_scaling=none"
            )
        data_ranks = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        return per_rank * int(data_ranks) * self.trainer.accumulate_grad_batches
