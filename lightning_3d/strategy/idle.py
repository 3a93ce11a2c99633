"""Optimizers that do nothing, for a step of manual optimization that only shows what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_3d.graph.calls import shadow


class IdleOptimizer:
    """Stands for an optimizer; whatever is called on it returns None."""

    def __init__(self, optimizer: Any = None) -> None:
        self.param_groups = getattr(optimizer, "param_groups", [])

    def step(self, closure: Any = None, **_: Any) -> Any:
        """Calls the closure, if one is given."""
        return None if closure is None else closure()

    def __getattr__(self, name: str) -> Any:
        return _nothing


@contextmanager
def idle_optimizers(module: LightningModule) -> Iterator[None]:
    """Context in which a module with manual optimization finds optimizers that change nothing.

    As many as ``configure_optimizers`` returns, which is called for that; with automatic optimization nothing happens.

    Args:
        module: The module whose step runs inside.
    """
    if module.automatic_optimization:
        yield
        return
    found = [IdleOptimizer(optimizer) for optimizer in _optimizers(module.configure_optimizers())]
    one_or_all: Any = found[0] if len(found) == 1 else found
    idle: dict[str, Callable[..., Any]] = {
        "optimizers": lambda use_pl_optimizer=True: one_or_all,
        "lr_schedulers": lambda: IdleOptimizer(),
        "manual_backward": _nothing,
        "clip_gradients": _nothing,
        "toggle_optimizer": _nothing,
        "untoggle_optimizer": _nothing,
    }
    put_back = [shadow(module, name, method) for name, method in idle.items()]
    try:
        yield
    finally:
        for undo in reversed(put_back):
            undo()


def _optimizers(configured: Any) -> list[Optimizer]:
    """The optimizers in what ``configure_optimizers`` returned, in order."""
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return [configured["optimizer"]] if "optimizer" in configured else []
    if isinstance(configured, (list, tuple)):
        if len(configured) == 2 and all(isinstance(part, (list, tuple)) for part in configured):
            return list(configured[0])
        return [optimizer for part in configured for optimizer in _optimizers(part)]
    return []


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
