"""Programs of features: accumulation, clipping, and looking at gradients."""

from __future__ import annotations

from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import Optimizer

from tests.features.fitting import fitted
from tests.features.here import Here
from tests.features.modules import Module
from tests.features.table import Seen

# ---- accumulation ----


def accumulation(here: Here) -> Seen:
    return fitted(here, Module(), accumulate_grad_batches=3, max_epochs=2)


def short_last_window(here: Here) -> Seen:
    return fitted(here, Module(), samples=40, accumulate_grad_batches=4, max_epochs=2, gradient_clip_val=0.5)


def accumulation_by_epoch(here: Here) -> Seen:
    return fitted(here, Module(), GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}), max_epochs=3)


# ---- clipping, and looking at gradients ----


def clipping_by_norm(here: Here) -> Seen:
    return fitted(here, Module(), gradient_clip_val=0.1)


def clipping_by_value(here: Here) -> Seen:
    return fitted(here, Module(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


class ClipsByEpoch(Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2 / (1 + self.current_epoch))


def own_clipping(here: Here) -> Seen:
    return fitted(here, ClipsByEpoch(), max_epochs=2)


class ClipsByTorch(Module):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm)
        self.log("infinity", nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=float("inf")))


def clipping_by_torch(here: Here) -> Seen:
    return fitted(here, ClipsByTorch(), accumulate_grad_batches=2)


class Norms(Module):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(cast("dict[str, Any]", grad_norm(self, norm_type=2)))


def logged_norms(here: Here) -> Seen:
    return fitted(here, Norms(), gradient_clip_val=0.1)


class WatchesGradients(Callback):
    """As monitoring callbacks do: after backward the whole norm, after the step the norms of weights."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_backward(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        total = 0.0
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                total += parameter.grad.norm(2).item() ** 2
        self.seen.append(total**0.5)

    def on_train_batch_end(self, trainer: Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        with torch.no_grad():
            norms = {name: float(value.norm()) for name, value in pl_module.named_parameters()}
            largest = max(float(value.abs().max()) for value in pl_module.parameters())
            mean = torch.cat([value.flatten() for value in pl_module.parameters()]).mean()
        self.seen.append([norms, largest, float(mean)])
        pl_module.log("weights", torch.stack([value.detach().norm() for value in pl_module.parameters()]).norm())


def watched(here: Here) -> Seen:
    callback = WatchesGradients()
    return {**fitted(here, Module(), callback), "seen": callback.seen}


class SkipsBadSteps(Module):
    """Zeroes gradients that are not finite or too large, as many modules do."""

    def on_after_backward(self) -> None:
        finite = all(torch.isfinite(value.grad).all() for value in self.parameters() if value.grad is not None)
        large = any(value.grad.abs().max() > 0.2 for value in self.parameters() if value.grad is not None)
        self.log("skipped", float(large or not finite))
        if large or not finite:
            self.zero_grad()


def skipped_steps(here: Here) -> Seen:
    return fitted(here, SkipsBadSteps())
