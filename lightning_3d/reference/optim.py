"""Which parameters decay, how the learning rate moves over the steps, and how it follows the batch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

LR_SCALINGS = ("none", "linear", "sqrt")

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)


def decay_groups(module: nn.Module, *, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those that weight decay shrinks and those that it leaves alone.

    Biases, the parameters of norms and all others with fewer than two dims do not decay. Frozen parameters are left
    out; a tied one stands once. Both groups are always there, also when empty, so that the optimizer's state has
    the same shape for every model.

    Args:
        module: The module to optimise.
        decay_embeddings: Whether embedding tables, and heads tied to one, decay.

    Returns:
        Two parameter groups. The first takes the optimizer's own weight decay, the second has 0.
    """
    spared = _NORMS if decay_embeddings else (*_NORMS, nn.Embedding, nn.EmbeddingBag)
    exempt = {id(p) for part in module.modules() if isinstance(part, spared) for p in part.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and not name.endswith("bias") and id(parameter) not in exempt
            (decayed if decays else plain).append(parameter)
    return [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]


def warmup_cosine(
    optimizer: Optimizer,
    *,
    warmup_steps: float = 0,
    total_steps: int | None = None,
    min_lr_ratio: float = 0.1,
) -> LambdaLR:
    """Builds the usual schedule of language models: a linear rise, then half a cosine down, then level.

    Args:
        optimizer: Whose learning rates are the peak.
        warmup_steps: Optimizer steps of the rise; below 1, a share of ``total_steps``.
        total_steps: Optimizer steps until the lowest rate.
        min_lr_ratio: The lowest rate as a share of the peak.

    Returns:
        A schedule to be stepped after each optimizer step. A resumed run follows its own arguments, not those of
        the run that saved the checkpoint, so that training can be made longer.

    Raises:
        ValueError: If an argument is out of its range.
    """
    if total_steps is None or total_steps < 1:
        raise ValueError(f"warmup_cosine got total_steps={total_steps}\n  valid: an integer of at least 1")
    if warmup_steps < 0:
        raise ValueError(f"warmup_cosine got warmup_steps={warmup_steps}\n  valid: 0 or more steps, or a share below 1")
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"warmup_cosine got min_lr_ratio={min_lr_ratio}\n  valid: 0 to 1")
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else round(warmup_steps)
    factor = functools.partial(warmup_cosine_factor, warmup=warmup, total=total_steps, floor=min_lr_ratio)
    return LambdaLR(optimizer, factor)


def warmup_cosine_factor(step: int, *, warmup: int, total: int, floor: float) -> float:
    """Returns the share of the peak learning rate with which a step is made.

    Args:
        step: Number of optimizer steps made before.
        warmup: Steps of the linear rise; the first is made with 1/warmup, not 0.
        total: Steps until ``floor``.
        floor: The lowest share.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def lr_factor(scaling: str, batch: int, base_batch: int | None) -> float:
    """Returns what the learning rate is multiplied by when the global batch is not the one it was tuned for.

    Args:
        scaling: "none"; "linear" (Goyal et al. 2017: batch / base); or "sqrt" (Krizhevsky 2014: its square root).
        batch: Samples per optimizer step, over all data ranks and accumulated batches.
        base_batch: Samples per optimizer step for which the learning rate was chosen.

    Raises:
        ValueError: If ``scaling`` is unknown or ``base_batch`` is missing.
    """
    if scaling not in LR_SCALINGS:
        raise ValueError(f"lr_scaling={scaling!r} is unknown\n  valid: {', '.join(LR_SCALINGS)}")
    if scaling == "none":
        return 1.0
    if base_batch is None or base_batch < 1:
        raise ValueError(
            f"lr_scaling={scaling!r} needs the batch that the learning rate was chosen for, got"
            f" base_batch_size={base_batch}\n  fix: base_batch_size=<samples per optimizer step>"
        )
    ratio = batch / base_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)


def with_schedule(
    optimizer: Optimizer, builder: Callable[..., LRScheduler] | None, module: LightningModule
) -> OptimizerLRScheduler:
    """Returns what ``configure_optimizers`` returns for an optimizer and its schedule, stepped after each step.

    Args:
        optimizer: The optimizer.
        builder: Builds the schedule from it; None if there is none. If it takes ``total_steps`` and was not given it,
            it gets the Trainer's estimate.
        module: Whose Trainer is asked.

    Raises:
        ValueError: If ``total_steps`` is needed and training has no end.
    """
    if builder is None:
        return optimizer
    options = {"total_steps": _total_steps(module.trainer)} if lacks_total_steps(builder) else {}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": builder(optimizer, **options), "interval": "step"}}


def lacks_total_steps(builder: Callable[..., Any]) -> bool:
    """Returns whether a scheduler's builder takes ``total_steps`` and has not been given it."""
    parameter = inspect.signature(builder).parameters.get("total_steps")
    return parameter is not None and parameter.default in (None, inspect.Parameter.empty)


def _total_steps(trainer: Trainer) -> int:
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise ValueError(
            "the scheduler needs total_steps, and training has no end\n"
            "  fix: trainer.max_steps=<n>, trainer.max_epochs=<n> or scheduler.total_steps=<n>"
        )
    return int(steps)
