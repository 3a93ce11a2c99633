"""Fitting a module in the features of optimization, and what is seen of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import Callback, Trainer

from tests.features.here import Here
from tests.features.modules import Data, Module, metrics, weights
from tests.features.table import Seen


class Rates(Callback):
    """Notes the learning rates of every step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])


class Configured(Module):
    """Trains with optimizers and schedulers that are made for it.

    Args:
        configure: Makes them.
    """

    def __init__(self, configure: Callable[[Module], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def fitted(here: Here, module: L.LightningModule, *callbacks: Callback, samples: int = 32, **options: Any) -> Seen:
    """Fits a module; returns metrics, weights, learning rates and the number of steps."""
    rates = Rates()
    trainer = here.trainer(rates, *callbacks, **options)
    trainer.fit(module, Data(here, samples))
    return {
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "rates": rates.seen,
        "steps": trainer.global_step,
    }
