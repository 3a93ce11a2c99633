"""Hooks of the user's on a pipeline: each finds the values that it makes of parameters, whichever rank holds these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_3d.graph.calls import shadow
from lightning_3d.shards.hook_values import Exchange, Holders, HookValues
from lightning_3d.shards.presence import Presence

# What runs beside training, or on one rank alone; and, without "on_", what may look at gradients.
_OTHERS = frozenset({"on_save_checkpoint", "on_load_checkpoint", "on_exception"})
_LOOKING = ("configure_gradient_clipping", "optimizer_zero_grad", "lr_scheduler_step")
# Their callbacks look at optimizers in these, which have doors of their own.
_REGROUPING = frozenset({"on_fit_start", "on_train_epoch_start"})
_LIBRARIES = ("lightning", "lightning_3d", "torch")


def hook_values(presence: Presence | None, holders: Holders | None) -> HookValues | None:
    """Returns what brings values to the hooks of a module; None without a pipeline.

    Args:
        presence: What the ranks of its pipeline have.
        holders: Which of them has what.
    """
    return None if presence is None or holders is None else HookValues(holders, Exchange(presence))


def open_hooks(module: LightningModule, values: HookValues) -> list[Callable[[], None]]:
    """Runs the hooks that users have written where values are brought; returns what undoes it.

    Args:
        module: The module; hooks of its Trainer's callbacks are opened too.
        values: Brings them.
    """
    owners: list[Any] = [module, *getattr(module._trainer, "callbacks", ())]
    return [
        shadow(owner, name, _around(owner, hook, values)) for owner in owners for name, hook in _hooks_of_users(owner)
    ]


def _hooks_of_users(owner: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    names: Iterable[str] = (name for name in dir(type(owner)) if name.startswith("on_") and name not in _OTHERS)
    if isinstance(owner, Callback):
        names = (name for name in names if not (isinstance(owner, BaseFinetuning) and name in _REGROUPING))
    else:
        names = (*names, *_LOOKING)
    for name in names:
        hook = getattr(owner, name)
        if callable(hook) and (getattr(hook, "__module__", None) or "").split(".")[0] not in _LIBRARIES:
            yield name, hook


def _around(owner: Any, hook: Callable[..., Any], values: HookValues) -> Callable[..., Any]:
    """Returns a hook bound to its owner, so that a copy of that calls its own."""
    function = getattr(hook, "__func__", None)
    bound = getattr(hook, "__self__", None) is owner

    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(function, self) if bound and function is not None else hook
        return values.run(partial(call, *args, **kwargs))

    return MethodType(run, owner)
