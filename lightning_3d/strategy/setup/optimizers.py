"""Optimizers where a rank holds some of the parameters only: the others are there while optimizers are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_3d.errors import ModuleError

_PARAMETERS, _NAMES = "params", "param_names"


class AbsentParameters:
    """The parameters that other ranks hold: in the optimizers while users make or change them, and out afterwards.

    Args:
        module: The user's module; what other ranks hold is on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._whole: list[tuple[dict[str, Any], dict[str, list[Any]]]] = []

    @contextmanager
    def shown(self, device: torch.device) -> Iterator[None]:
        """Context in which the module has a stand-in for every parameter that it does not hold.

        It has shape, dtype and ``requires_grad`` of the real one, and no memory: all elements are one.

        Args:
            device: Of this rank's parameters.
        """
        places = list(_places_of_absent(self._module))
        for place, key, absent in places:
            place[key] = self._stand_in(absent, device)
        try:
            yield
        finally:
            for place, key, absent in places:
                place[key] = absent
            for absent, stand_in in self._stand_ins.values():
                # Freezing is meant for the real one.
                absent.requires_grad_(stand_in.requires_grad)

    def take_out(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes absent parameters and their stand-ins out of optimizers, whose groups may be empty then."""
        real = {id(stand_in): absent for absent, stand_in in self._stand_ins.values()}
        self._whole.clear()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                members = group[_PARAMETERS]
                for parameter in members:
                    if id(parameter) in real:
                        # Some optimizers have a state before their first step.
                        optimizer.state.pop(parameter, None)
                members[:] = [real.get(id(parameter), parameter) for parameter in members]
                here = [not parameter.is_meta for parameter in members]
                lists = {key: group[key] for key in (_PARAMETERS, _NAMES) if key in group}
                self._whole.append((group, {key: list(entries) for key, entries in lists.items()}))
                for entries in lists.values():
                    # The same object, which the optimizer may have kept.
                    entries[:] = compress(list(entries), here)

    @contextmanager
    def in_optimizers(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Context in which optimizers have the absent parameters, each in its place."""
        for group, whole in self._whole:
            known = {id(parameter) for parameter in whole[_PARAMETERS]}
            new = [id(parameter) not in known for parameter in group[_PARAMETERS]]
            for key, entries in whole.items():
                group[key][:] = [*entries, *compress(list(group[key]), new)]
        try:
            yield
        finally:
            self.take_out(optimizers)

    def _stand_in(self, absent: nn.Parameter, device: torch.device) -> nn.Parameter:
        if id(absent) not in self._stand_ins:
            one = torch.zeros((), dtype=absent.dtype, device=device)
            stand_in = nn.Parameter(one.expand(absent.shape), requires_grad=absent.requires_grad)
            # What users have written on it.
            vars(stand_in).update(vars(absent))
            self._stand_ins[id(absent)] = absent, stand_in
        return self._stand_ins[id(absent)][1]


def reads_loss(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer may decide by the loss of its closure, so that data ranks need the same one."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def check_separable(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that cannot step on the parameters of one rank alone.

    Raises:
        ModuleError: One combines all parameters in one vector.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ModuleError(
            "LBFGS takes all parameters as one vector, and with pipeline_parallel_size above 1 each rank holds some "
            "of them.",
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
