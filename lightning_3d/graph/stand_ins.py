"""What a fake run puts in the place of metrics and optimizers: they look like them and do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers
from torchmetrics import Metric

from lightning_3d.graph.calls import shadow


@contextmanager
def without_metrics(module: LightningModule) -> Iterator[None]:
    """Context in which torchmetrics count nothing and are 0; they would read values and compute nothing of use."""
    with ExitStack() as at_end:
        for child in module.modules():
            if isinstance(child, Metric):
                at_end.callback(shadow(child, "update", _nothing))
                at_end.callback(shadow(child, "forward", _zero))
                at_end.callback(shadow(child, "compute", _zero))
        yield


@contextmanager
def without_optimizers(module: LightningModule) -> Iterator[None]:
    """Context in which a step that optimizes manually runs its forward passes and nothing else."""
    if module.automatic_optimization:
        yield
        return
    optimizers, schedulers, _ = _configure_optimizers(cast("Any", module.configure_optimizers()))
    stand_ins = {
        "optimizers": _returns([IdleOptimizer() for _ in optimizers]),
        "lr_schedulers": _returns([IdleOptimizer() for _ in schedulers]),
        **dict.fromkeys(("manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), _nothing),
    }
    with ExitStack() as at_end:
        for name, method in stand_ins.items():
            at_end.callback(shadow(module, name, method))
        yield


class IdleOptimizer:
    """An optimizer or scheduler that runs the closure it is given."""

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure, if there is one."""
        return closure() if callable(closure) else None

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Does nothing, as a context."""
        yield

    def __getattr__(self, name: str) -> Any:
        if name == "param_groups":
            return []
        return _nothing


def _returns(found: list[IdleOptimizer]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        if not found:
            return None
        return found[0] if len(found) == 1 else list(found)

    return method


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(())
