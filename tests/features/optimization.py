"""Features of optimization: accumulation, clipping, optimizers, schedulers, what trains and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from tests.features.fitting import Configured, fitted
from tests.features.gradients import (
    accumulation,
    accumulation_by_epoch,
    clipping_by_norm,
    clipping_by_torch,
    clipping_by_value,
    logged_norms,
    own_clipping,
    short_last_window,
    skipped_steps,
    watched,
)
from tests.features.here import CUBE, PIPELINE, Here
from tests.features.modules import CLASSES, WIDTH, Module
from tests.features.partly import adapters, backbone, finetuning, frozen
from tests.features.table import Feature, Seen

_ON_PIPELINES = (PIPELINE.name, CUBE.name)
_MANUAL = dict.fromkeys(_ON_PIPELINES, "automatic_optimization=False, and with pipeline_parallel_size above 1")


# ---- optimizers ----


def optimizer(make: Callable[[Iterable[Any]], Optimizer], here: Here) -> Seen:
    return fitted(here, Configured(partial(_made, make, {})), gradient_clip_val=0.5)


def torch_optimizer(name: str, options: dict[str, Any], here: Here) -> Seen:
    return fitted(here, Configured(partial(_made, getattr(torch.optim, name), options)), gradient_clip_val=0.5)


def line_search(here: Here) -> Seen:
    options = {"max_iter": 3, "line_search_fn": "strong_wolfe"}
    return fitted(here, Configured(partial(_made, torch.optim.LBFGS, options)))


def _made(make: Callable[..., Optimizer], options: dict[str, Any], module: Module) -> Optimizer:
    return make(module.parameters(), **options)


def groups_by_name(module: Module) -> Any:
    plain = ("bias", "norm")
    decayed = [value for name, value in module.named_parameters() if not any(part in name for part in plain)]
    others = [value for name, value in module.named_parameters() if any(part in name for part in plain)]
    return AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=module.lr
    )


def decay_by_name(here: Here) -> Seen:
    return fitted(here, Configured(groups_by_name))


class TwoInTurn(Module):
    """Two optimizers in turn, as a GAN has: each leaves the gradients of the other's parameters alone or None."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.missing: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        first, second = cast("list[Any]", self.optimizers())
        if batch_idx % 2:
            self.toggle_optimizer(second)
            with torch.no_grad():
                scores = self(inputs)
            loss = (self.critic(scores) - 1).square().mean() + self.critic(F.one_hot(targets, CLASSES) * 1.0).mean()
            self.step(second, loss)
            self.untoggle_optimizer(second)
        else:
            self.toggle_optimizer(first)
            scores = self(inputs)
            self.step(first, F.cross_entropy(scores, targets) + self.critic(scores).square().mean())
            self.untoggle_optimizer(first)
        self.log("loss", 1.0 * batch_idx)
        self.missing.append(sum(value.grad is None for value in self.parameters()))

    def step(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return AdamW(self.net.parameters(), lr=0.01), SGD(self.critic.parameters(), lr=0.05)


def two_in_turn(here: Here) -> Seen:
    module = TwoInTurn()
    return {**fitted(here, module), "missing": module.missing}


class OneByHand(Module):
    """Manual optimization with accumulation of its own and a scheduler that it steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        stepper: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        self.log("train_loss", loss, sync_dist=True)
        if batch_idx % 2:
            stepper.step()
            stepper.zero_grad()
            cast(Any, self.lr_schedulers()).step()

    def configure_optimizers(self) -> Any:
        stepper = AdamW(self.parameters(), lr=0.01)
        return [stepper], [lr_scheduler.ExponentialLR(stepper, 0.8)]


def by_hand(here: Here) -> Seen:
    return fitted(here, OneByHand())


class TwoHeads(Module):
    """Trains with the second of two heads in every other batch only: it has no gradient in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(CLASSES, CLASSES)
        self.missing: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        scores = self(inputs)
        others = self.other(scores)
        return F.cross_entropy(others if batch_idx % 2 else scores, targets)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.missing.append([name for name, value in self.named_parameters() if value.grad is None])
        self.log("norm", nn.utils.get_total_norm([v.grad for v in self.parameters() if v.grad is not None]))


def missing_gradients(here: Here) -> Seen:
    module = TwoHeads()
    return {**fitted(here, module), "missing": module.missing}


class StepsOnItsOwn(Module):
    """Warms up in `optimizer_step`, as Lightning's documentation shows, and zeroes gradients in its own way."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 6) * self.lr

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def own_step(here: Here) -> Seen:
    return fitted(here, StepsOnItsOwn(), max_epochs=2, accumulate_grad_batches=2)


class ChangesRates(Module):
    """Sets learning rates in hooks, and reads the optimizer there."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.lr / (1 + self.current_epoch)

    def on_train_batch_end(self, *args: Any) -> None:
        stepper: Any = self.optimizers()
        steps = {int(state["step"]) for state in stepper.state.values()}
        self.read.append([steps, stepper.param_groups[0]["betas"], len(stepper.param_groups)])


def rates_in_hooks(here: Here) -> Seen:
    module = ChangesRates()
    return {**fitted(here, module, max_epochs=2), "read": module.read}


class HooksOnSteps(Module):
    """Registers hooks on its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        stepper = AdamW(self.parameters(), lr=self.lr)
        stepper.register_step_pre_hook(lambda *_: self.calls.append("before"))
        stepper.register_step_post_hook(self.after)
        return stepper

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        self.calls.append("after")
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.3, 0.3)


def hooks_on_steps(here: Here) -> Seen:
    module = HooksOnSteps()
    return {**fitted(here, module), "calls": module.calls}


# ---- schedulers ----


def one_cycle(module: Module) -> Any:
    total = int(module.trainer.estimated_stepping_batches)
    stepper = AdamW(module.parameters(), lr=module.lr)
    scheduler = lr_scheduler.OneCycleLR(stepper, max_lr=0.05, total_steps=total)
    return {"optimizer": stepper, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def cycled(here: Here) -> Seen:
    return fitted(here, Configured(one_cycle), max_epochs=3, accumulate_grad_batches=2)


def plateau(module: Module) -> Any:
    stepper = SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(stepper, patience=0, threshold=0.05, factor=0.5)
    return {"optimizer": stepper, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def plateau_by_step(module: Module) -> Any:
    stepper = SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(stepper, patience=0, factor=0.5)
    settings = {"scheduler": scheduler, "monitor": "train_loss_step", "interval": "step", "frequency": 2}
    return {"optimizer": stepper, "lr_scheduler": settings}


def on_plateau(configure: Callable[[Module], Any], here: Here) -> Seen:
    return fitted(here, Configured(configure), max_epochs=5)


def several(module: Module) -> Any:
    stepper = AdamW(module.parameters(), lr=module.lr)
    warm = lr_scheduler.LinearLR(stepper, 0.1, total_iters=3)
    sequence = lr_scheduler.SequentialLR(stepper, [warm, lr_scheduler.CosineAnnealingLR(stepper, 8)], milestones=[3])
    epochs = lr_scheduler.StepLR(stepper, 1, gamma=0.9)
    return [stepper], [{"scheduler": sequence, "interval": "step"}, {"scheduler": epochs, "interval": "epoch"}]


def several_schedulers(here: Here) -> Seen:
    return fitted(here, Configured(several), max_epochs=3, accumulate_grad_batches=2)


class StepsItsScheduler(Configured):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


def own_scheduler_step(here: Here) -> Seen:
    return fitted(here, StepsItsScheduler(several), max_epochs=2)


def _optimizers() -> tuple[Feature, ...]:
    """One row for each way in which an optimizer may step: torch chooses by device, users by arguments."""
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("AdamW(foreach=True)", "AdamW", {"lr": 0.01, "foreach": True}),
        ("AdamW(fused=True)", "AdamW", {"lr": 0.01, "fused": True}),
        ("SGD(foreach=True)", "SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
        ("SGD(fused=True)", "SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    )
    return tuple(
        Feature(name=name, program=partial(torch_optimizer, make, options), always=(CUBE,) if "fused" in name else ())
        for name, make, options in rows
    )


FEATURES: tuple[Feature, ...] = (
    Feature(name="accumulate_grad_batches", program=accumulation, always=(CUBE,)),
    Feature(name="accumulate_grad_batches, short last window", program=short_last_window),
    Feature(name="GradientAccumulationScheduler", program=accumulation_by_epoch),
    Feature(name="gradient_clip_val by norm", program=clipping_by_norm, always=(CUBE,)),
    Feature(name="gradient_clip_val by value", program=clipping_by_value),
    Feature(name="configure_gradient_clipping", program=own_clipping),
    Feature(name="torch.nn.utils.clip_grad_norm_ in a hook", program=clipping_by_torch, always=(PIPELINE,)),
    Feature(name="grad_norm in on_before_optimizer_step", program=logged_norms, always=(CUBE,)),
    Feature(name="norms of gradients and weights in callbacks", program=watched, always=(PIPELINE,)),
    Feature(name="steps skipped by what gradients are", program=skipped_steps),
    Feature(name="manual optimization", program=by_hand, refused=_MANUAL),
    Feature(name="several optimizers in turn", program=two_in_turn, refused=_MANUAL),
    Feature(name="parameters without gradient in some batches", program=missing_gradients),
    Feature(name="optimizer_step and optimizer_zero_grad overridden", program=own_step),
    Feature(name="learning rates and optimizer state in hooks", program=rates_in_hooks),
    Feature(name="hooks of optimizers", program=hooks_on_steps),
    *_optimizers(),
    Feature(
        name="LBFGS, with a line search",
        program=line_search,
        refused=dict.fromkeys(_ON_PIPELINES, "LBFGS takes all parameters as one vector"),
        close=1e-7,
    ),
    Feature(name="parameter groups by name, with weight decay", program=decay_by_name),
    Feature(name="OneCycleLR with estimated_stepping_batches", program=cycled),
    Feature(name="ReduceLROnPlateau", program=partial(on_plateau, plateau)),
    Feature(name="ReduceLROnPlateau by step", program=partial(on_plateau, plateau_by_step)),
    Feature(name="several schedulers, by step and by epoch", program=several_schedulers),
    Feature(name="lr_scheduler_step overridden", program=own_scheduler_step),
    Feature(name="frozen parts", program=frozen),
    Feature(name="adapters as in LoRA, and their checkpoint", program=adapters, always=(CUBE,)),
    Feature(name="BaseFinetuning", program=finetuning, always=(CUBE,)),
    Feature(name="BackboneFinetuning", program=backbone),
)
