"""Methods of a LightningModule and its callbacks that must know the mesh while a Trainer runs it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_3d.graph.calls import shadow
from lightning_3d.shards.absent import check_readable
from lightning_3d.shards.hook_values import HookValues, as_everywhere
from lightning_3d.strategy.setup.hooks import open_hooks
from lightning_3d.strategy.setup.optimizers import AbsentParameters

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")
# Where a finetuning callback changes parameter groups and writes them down, and where it makes them anew from that.
_REGROUPS = ("on_train_epoch_start", "on_fit_start")


class ModuleDoors:
    """Makes ``log``, toggles of optimizers and finetuning callbacks mean on a mesh what they mean on one device.

    Attributes:
        absent: The parameters that other ranks hold.

    Args:
        module: The user's module, its parameters this rank's part of them.
        values: Brings values to hooks; None without a pipeline.
    """

    def __init__(self, module: LightningModule, values: HookValues | None = None) -> None:
        self.absent = AbsentParameters(module)
        self._module = module
        self._values = values
        self._opened: list[Callable[[], None]] = []
        self._resting: list[tuple[nn.Module, str, nn.Parameter]] = []

    def open(self) -> None:
        """Opens the doors. Parameters must be at rest, no gathered one in a part's place."""
        if self._opened:
            return
        self._resting = [
            (part, name, parameter)
            for part in self._module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        if self._values is not None:
            self._opened += open_hooks(self._module, self._values)
        # Bound to the module, so that a copy of it has doors of its own.
        self._opened.append(shadow(self._module, "log", MethodType(_log_whole, self._module)))
        self._opened += [shadow(self._module, name, self._followed(name)) for name in _TOGGLES]
        for callback in getattr(self._module._trainer, "callbacks", ()):
            if isinstance(callback, BaseFinetuning):
                self._opened.append(shadow(callback, "finetune_function", MethodType(_finetune, callback)))
                self._opened += [shadow(callback, name, self._on_whole_groups(callback, name)) for name in _REGROUPS]

    def close(self) -> None:
        """The methods are the class's own again."""
        while self._opened:
            # The last first, since doors may stand in doors.
            self._opened.pop()()

    def _followed(self, name: str) -> Callable[[Any], None]:
        def toggle(optimizer: Any) -> None:
            getattr(type(self._module), name)(self._module, optimizer)
            self._gathered_follow()

        return toggle

    def _on_whole_groups(self, callback: BaseFinetuning, name: str) -> Callable[..., None]:
        def hook(trainer: Trainer, *args: Any) -> None:
            with self.absent.in_optimizers(trainer.optimizers):
                getattr(type(callback), name)(callback, trainer, *args)

        return hook

    def _gathered_follow(self) -> None:
        """Optimizers hold this rank's parts; a whole parameter that is gathered now must train as its part does."""
        for part, name, parameter in self._resting:
            present = part._parameters[name]
            if present is not None and present is not parameter:
                present.requires_grad_(parameter.requires_grad)


def _log_whole(self: LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
    """Logs a value that is computed from parts as one number: a part's would differ from rank to rank."""
    value = as_everywhere(value, "log")
    check_readable(value, f"log({name!r}, ...)")
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    type(self).log(self, name, whole, *args, **options)


def _finetune(self: BaseFinetuning, *args: Any) -> None:
    """Lets parameters train, in a mode in which the callback may look for each of them in an optimizer."""
    with _OfOneShape():
        type(self).finetune_function(self, *args)


class _OfOneShape(TorchFunctionMode):
    """Tensors of different shapes are not equal, nor is one of another rank to any but itself.

    Torch fails to compare them where they are cut differently, and where there are no values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            one, other = args
            if one is other or one.shape != other.shape or one.is_meta or other.is_meta:
                return one is other
        return func(*args, **(kwargs or {}))
