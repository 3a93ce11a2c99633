"""A LightningModule around any model of Hugging Face that computes its own loss; needs the extra ``hf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_3d.reference.optim import decay_groups, with_schedule


def from_config(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """Returns a model with new weights.

    Args:
        architecture: Name of a class of ``transformers``, such as "MixtralForCausalLM".
        config: What differs from the defaults of its configuration class.

    Raises:
        ValueError: If transformers has no such class, or is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{architecture} needs transformers\n  fix: pip install 'lightning-3d[hf]'") from error
    kind: Any = getattr(transformers, architecture, None)
    if kind is None or not hasattr(kind, "config_class"):
        raise ValueError(f"transformers {transformers.__version__} has no model {architecture!r}")
    model: nn.Module = kind(kind.config_class(**config))
    return model


class HuggingFaceModel(L.LightningModule):
    """Trains a model on batches of its own keyword arguments, by the loss that it returns.

    Logs ``train_loss`` and ``val_loss``.

    Args:
        model: A module whose output has ``.loss``; or a callable without arguments that builds it in
            ``configure_model``, so that a strategy may build it on the meta device.
        optimizer: Builds the optimizer from parameter groups.
        scheduler: Builds a schedule from the optimizer, stepped after each optimizer step. If it takes ``total_steps``
            and was not given it, it gets the Trainer's estimate.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.model: nn.Module | None = model if isinstance(model, nn.Module) else None
        self.build_model = None if isinstance(model, nn.Module) else model
        self.build_optimizer = optimizer
        self.build_scheduler = scheduler

    def configure_model(self) -> None:
        """Builds the model, once, if a builder was given."""
        if self.model is None and self.build_model is not None:
            self.model = self.build_model()

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the model's own loss."""
        return self._loss(batch, "train")

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the model's own loss."""
        return self._loss(batch, "val")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Builds the optimizer, and the schedule if there is one."""
        return with_schedule(self.build_optimizer(decay_groups(self)), self.build_scheduler, self)

    def _loss(self, batch: Mapping[str, Tensor], stage: str) -> Tensor:
        assert self.model is not None, "configure_model() builds the model and has not run yet"
        loss: Tensor = self.model(**batch).loss
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True)
        return loss
