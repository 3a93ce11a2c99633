"""Optimizers where a rank holds some of the parameters only: the others are there while optimizers are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_3d.errors import ModuleError

_PARAMETERS, _NAMES = "params", "param_names"


class StandIns:
    """Parameters that stand for those of other ranks while a user makes optimizers.

    They have shape, dtype, device and ``requires_grad`` of the real ones, and no memory: all elements are one.

    Args:
        module: The user's module; what other ranks hold is on the meta device.
        device: Of this rank's parameters.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    @contextmanager
    def present(self) -> Iterator[None]:
        """Context in which the module has a stand-in for every parameter that it does not hold."""
        places = list(_places_of_absent(self._module))
        for place, key, absent in places:
            place[key] = self._stand_in(absent)
        try:
            yield
        finally:
            for place, key, absent in places:
                place[key] = absent
            for absent, stand_in in self._made.values():
                # Freezing is meant for the real one.
                absent.requires_grad_(stand_in.requires_grad)

    def take_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes the stand-ins out of optimizers, whose groups may be empty then."""
        stand_ins = {id(stand_in) for _, stand_in in self._made.values()}
        _take_out(optimizers, lambda parameter: id(parameter) in stand_ins)

    def _stand_in(self, absent: nn.Parameter) -> nn.Parameter:
        if id(absent) not in self._made:
            one = torch.zeros((), dtype=absent.dtype, device=self._device)
            stand_in = nn.Parameter(one.expand(absent.shape), requires_grad=absent.requires_grad)
            # What users have written on it.
            vars(stand_in).update(vars(absent))
            self._made[id(absent)] = absent, stand_in
        return self._made[id(absent)][1]


def take_out_absent(optimizers: Sequence[Optimizer]) -> None:
    """Takes parameters out of optimizers that other ranks hold."""
    _take_out(optimizers, lambda parameter: parameter.is_meta)


def check_separable(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that cannot step on the parameters of one rank alone.

    Raises:
        ModuleError: There are several, or one that combines all parameters in one vector.
    """
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ModuleError(
            f"configure_optimizers returns {len(optimizers)} optimizers ({kinds}), and with pipeline_parallel_size "
            "above 1 a schedule runs one backward for all of them.",
            fix="one optimizer with several parameter groups, or pipeline_parallel_size=1",
        )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ModuleError(
                "LBFGS takes all parameters as one vector, and with pipeline_parallel_size above 1 each rank holds "
                "some of them.",
                fix="an optimizer that treats each parameter by itself, such as AdamW, or pipeline_parallel_size=1",
            )


def _places_of_absent(module: nn.Module) -> Iterator[tuple[Any, Any, nn.Parameter]]:
    """Where a module has parameters of other ranks: what holds each, under which key, and the parameter."""
    for child in module.modules():
        for place in (child._parameters, vars(child)):
            for key, value in place.items():
                if isinstance(value, list):
                    yield from ((value, index, each) for index, each in enumerate(value) if _is_absent(each))
                elif _is_absent(value):
                    yield place, key, value


def _is_absent(value: object) -> TypeGuard[nn.Parameter]:
    return isinstance(value, nn.Parameter) and value.is_meta


def _take_out(optimizers: Sequence[Optimizer], unwanted: Callable[[Tensor], bool]) -> None:
    """Takes parameters out of optimizers, whose lists stay the same objects."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            out = [unwanted(parameter) for parameter in group[_PARAMETERS]]
            for parameter in compress(group[_PARAMETERS], out):
                # Some optimizers have a state before their first step.
                optimizer.state.pop(parameter, None)
            for key in (_PARAMETERS, _NAMES):
                if key in group:
                    group[key][:] = [entry for entry, gone in zip(group[key], out, strict=True) if not gone]
