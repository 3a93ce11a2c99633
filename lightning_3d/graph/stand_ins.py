"""What a fake run puts in the place of metrics and optimizers: they look like them and do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import (
    LightningOptimizer,
    _configure_optimizers,
    _init_optimizers_and_lr_schedulers,
)
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.graph.calls import shadow
from lightning_3d.graph.fake_parameters import fake_parameters
from lightning_3d.graph.metrics import metrics_of
from lightning_3d.graph.quiet import quiet


@contextmanager
def without_values(module: LightningModule) -> Iterator[None]:
    """Context in which a step of a module runs with parameters that have no values, and does nothing beside."""
    with fake_parameters(module), without_effects(module), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def without_effects(module: LightningModule) -> Iterator[None]:
    """Context in which a step of a module leaves no trace in it, and neither metrics nor optimizers do anything."""
    with quiet(module), without_metrics(module), without_optimizers(module):
        yield


@contextmanager
def without_metrics(module: LightningModule) -> Iterator[None]:
    """Context in which torchmetrics count nothing and are 0; they would read values and compute nothing of use."""
    with ExitStack() as at_end:
        for metric in metrics_of(module):
            at_end.callback(shadow(metric, "update", _nothing))
            at_end.callback(shadow(metric, "forward", _zero))
            at_end.callback(shadow(metric, "compute", _zero))
        yield


@contextmanager
def without_optimizers(module: LightningModule) -> Iterator[None]:
    """Context in which a step that optimizes manually runs its forward passes and nothing else.

    Others may ask for optimizers that are made later, to log a learning rate: they find some that are made now.
    """
    if module.automatic_optimization:
        with _early_optimizers(module):
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


@contextmanager
def _early_optimizers(module: LightningModule) -> Iterator[None]:
    """Context in which a Trainer that has no optimizers yet makes some of the present parameters when it is asked."""
    trainer = module._trainer
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.strategy.optimizers:
        yield
        return
    strategy = trainer.strategy
    made = functools.cache(lambda: _init_optimizers_and_lr_schedulers(module))
    early = {
        "_optimizers": _MadeWhenUsed(lambda: made()[0]),
        "_lightning_optimizers": _MadeWhenUsed(
            lambda: [LightningOptimizer._to_lightning_optimizer(optimizer, strategy) for optimizer in made()[0]]
        ),
        "lr_scheduler_configs": _MadeWhenUsed(lambda: made()[1]),
    }
    with ExitStack() as at_end:
        for name, found in early.items():
            at_end.callback(shadow(strategy, name, found))
        yield


class _MadeWhenUsed(list[Any]):
    """A list that is filled when somebody looks into it.

    Args:
        make: Returns its entries.
    """

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._make: Callable[[], Sequence[Any]] | None = make

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._fill()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._fill()
        return super().__getitem__(index)

    def _fill(self) -> None:
        if self._make is not None:
            make, self._make = self._make, None
            self.extend(make())


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
