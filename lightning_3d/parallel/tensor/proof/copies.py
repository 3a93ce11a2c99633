"""Copies of a user's module for a trial: other tensors in the place of its own, and nothing that anyone hears of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.graph.calls import shadow
from lightning_3d.graph.quiet import silent
from lightning_3d.graph.stand_ins import without_metrics
from lightning_3d.parallel.tensor.regions.plan import Region

# Relative to the size of a parameter, and what counts as its size at least: what a model begins with as zeros hides
# mistakes.
_NOISE = 0.05
_LEAST_SIZE = 0.1

Values = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Names:
    """Names in a module, which are others once its stacks are shortened.

    Attributes:
        tensors: The first name of every parameter, buffer and other tensor, by identity.
        modules: The name of every sub-module.
    """

    tensors: Mapping[int, str]
    modules: Mapping[nn.Module, str]

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """Returns the names in a module as it is now."""
        tensors: dict[int, str] = {}
        for name, tensor in (*module.named_parameters(), *_other_tensors(module)):
            tensors.setdefault(id(tensor), name)
        return cls(tensors, {child: name for name, child in module.named_modules()})

    def regions(self, module: nn.Module, regions: Iterable[Region]) -> tuple[Region, ...]:
        """Returns the regions that are left in a module, under the names that it has now."""
        now = {self.modules[child]: name for name, child in module.named_modules()}
        return tuple(replace(region, module=now[region.module]) for region in regions if region.module in now)


@dataclass(frozen=True, slots=True)
class Whole:
    """The tensors of a module with values to compute with, tied ones once.

    Attributes:
        names: First names of parameters, by the identity of the module's own.
        tensors: New parameters, buffers and other tensors, likewise.
        dtype: That of floating ones.
    """

    names: Mapping[int, str]
    tensors: Mapping[int, Tensor]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Heard:
    """What a copy's step tells besides what it returns.

    Attributes:
        logged: Tensors that it logged.
        losses: What it called ``manual_backward`` with.
    """

    logged: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def whole_tensors(
    module: nn.Module, names: Mapping[int, str], *, dtype: torch.dtype, seed: int, values: Values | None
) -> Whole:
    """Returns new values for a module's tensors: its own and some noise on its parameters.

    Args:
        module: The module, real or on the meta device; its stacks may be shortened.
        names: First names of its tensors before that.
        dtype: What floating tensors become.
        seed: Of the noise.
        values: Initial values by name, for what is on the meta device; without them, parameters are random there.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Tensor] = {}
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    for key, parameter in parameters.items():
        value = _plain(names[key], parameter, values, dtype)
        if value is None:
            value = torch.randn(parameter.shape, generator=generator, dtype=dtype) * _scale(parameter)
        elif value.is_floating_point():
            size = float(value.square().mean().sqrt()) if value.numel() else 0.0
            noise = torch.randn(value.shape, generator=generator, dtype=dtype)
            value = value.add_(noise, alpha=_NOISE * max(size, _LEAST_SIZE))
        found[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for _, tensor in _other_tensors(module):
        if id(tensor) not in found:
            value = _plain(names[id(tensor)], tensor, values, dtype)
            found[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype) if value is None else value
    return Whole({key: names[key] for key in parameters}, found, dtype)


def copied(module: LightningModule, tensors: Mapping[int, Tensor], dtype: torch.dtype) -> LightningModule:
    """Returns a copy of a module that holds other tensors, at the same Trainer.

    Args:
        module: The module.
        tensors: What the copy has in the place of the module's own tensors, by their identity. They are not copied.
        dtype: That of floating ones.
    """
    twin = copy.deepcopy(module, dict(tensors))
    twin._trainer = module._trainer
    for child in twin.modules():
        if isinstance(child, _DeviceDtypeModuleMixin):
            child._device, child._dtype = torch.device("cpu"), dtype
    return twin


@contextmanager
def listened(twin: LightningModule) -> Iterator[Heard]:
    """Context in which a copy tells nobody else, asks no other process, and its metrics count nothing."""
    heard = Heard()

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            heard.logged.append(value)

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        heard.losses.append(loss)

    with ExitStack() as at_end:
        at_end.enter_context(without_metrics(twin))
        at_end.callback(shadow(twin, "log", log))
        at_end.callback(shadow(twin, "print", silent))
        at_end.callback(shadow(twin, "all_gather", _alone))
        at_end.callback(shadow(twin, "manual_backward", manual_backward))
        yield heard


def _alone(data: Any, *args: Any, **kwargs: Any) -> Any:
    """What gathering gives on one device."""
    return data


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Returns nested containers with floating tensors in a dtype, on the CPU."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to("cpu", dtype if leaf.is_floating_point() else None), tree)


def _other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and plain attributes of sub-modules."""
    for prefix, child in module.named_modules():
        for name, value in (*child._buffers.items(), *vars(child).items()):
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}" if prefix else name, value


def _plain(name: str, tensor: Tensor, values: Values | None, dtype: torch.dtype) -> Tensor | None:
    """A copy to compute with; None if there are no values."""
    if tensor.is_meta:
        if values is None:
            return None
        tensor = values(name)
    copied = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
    return copied.contiguous()


def _scale(parameter: Tensor) -> float:
    """Keeps products of random matrices in the size of what goes in."""
    return float(parameter[0].numel() ** -0.5) if parameter.dim() > 1 else 1.0
