"""The table of parameters: taken from the whole module before anything changes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.errors import ModuleError
from lightning_3d.units import format_bytes, format_count


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterInfo:
    """One parameter.

    Attributes:
        names: All its names in the module, the first one in module order; more than one means tied weights.
        shape: Its global shape.
        dtype: Its element type.
        requires_grad: False for a frozen parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def name(self) -> str:
        """The name that stands for the parameter everywhere."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of one full copy."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterTable:
    """Every parameter once, in module order."""

    rows: tuple[ParameterInfo, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(row.numel for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of one full copy of all parameters."""
        return sum(row.nbytes for row in self.rows)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of each parameter that has more than one."""
        return tuple(row.names for row in self.rows if len(row.names) > 1)

    def __str__(self) -> str:
        frozen = sum(row.numel for row in self.rows if not row.requires_grad)
        text = f"{format_count(self.numel)} parameters, {format_bytes(self.nbytes)}"
        text += f", {format_count(frozen)} frozen" if frozen else ""
        return text + (f", {len(self.ties)} tied" if self.ties else "")


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class as its author wrote it; FSDP2 puts one of its own in front."""
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def parameter_table(module: nn.Module) -> ParameterTable:
    """Returns the table of a module's parameters, with every name that each of them has."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    rows = (
        ParameterInfo(
            names=tuple(names[key]),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            requires_grad=parameter.requires_grad,
        )
        for key, parameter in found.items()
    )
    return ParameterTable(rows=tuple(rows))


@contextmanager
def marks_kept(module: nn.Module) -> Iterator[None]:
    """Attributes that users have set on parameters are on whatever stands under their names afterwards."""
    marks = {name: dict(vars(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        present = vars(parameter)
        present.update({mark: value for mark, value in marks.get(name, {}).items() if mark not in present})


def refuse_accumulation_hooks(name: str, parameter: nn.Parameter) -> None:
    """Refuses a hook that waits for the accumulated gradient of a parameter that is about to be divided.

    Args:
        name: The parameter's.
        parameter: It, still whole.

    Raises:
        ModuleError: It has one.
    """
    if parameter._post_accumulate_grad_hooks:
        raise ModuleError(
            f"parameter '{name}' has a hook that runs when its gradient has accumulated, set before the parameter was "
            "divided among the ranks.",
            fix="register it in configure_optimizers or on_fit_start, or use on_before_optimizer_step",
        )
