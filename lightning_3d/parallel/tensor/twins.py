"""Modules that no step uses, as an average of the weights or a frozen copy: they are cut as what they are a copy of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from lightning_3d.graph.observer import Function, Observer, Proceed, Scene
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.trace.meter import BlockNames


class UsedParameters(Observer):
    """Notes which parameters a step uses.

    Attributes:
        names: Their first names.

    Args:
        table: The module's parameters.
    """

    def __init__(self, table: ParameterTable) -> None:
        self.names: set[str] = set()
        self._blocks = BlockNames(table)
        self._scene: Scene | None = None

    def begin(self, scene: Scene) -> None:
        """Every pass has parameters of its own."""
        self._scene = scene

    def around_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:
        """Looks for parameters in the arguments."""
        assert self._scene is not None, "a pass has begun"
        found = map(self._scene.name_of, pytree.tree_leaves((args, kwargs)))
        self.names.update(name for name in found if name is not None)
        return proceed(function, args, kwargs)

    def repeated(self, block: str, first: str) -> None:
        """A block that stands for another uses what that one does."""
        self.names.update(twin for name, twin in self._blocks.twins(block, first).items() if name in self.names)


def with_twins(plan: TensorPlan, module: nn.Module, parameters: ParameterTable, used: Collection[str]) -> TensorPlan:
    """Returns a plan in which copies of modules are cut as their originals.

    A copy is the outermost module without a parameter that is used, whose class, names and shapes are those of a module
    that is cut; not a single layer, which may have another's shape by chance. What the user's `tensor_plan` says of a
    copy's parameters counts.

    Args:
        plan: What the step has shown.
        module: The whole module.
        parameters: Its parameters.
        used: First names of those that the step uses.
    """
    first = {name: info.name for info in parameters.rows for name in info.names}
    rows = {row.name: row for row in plan.rows}
    inside = {
        prefix: _inside(child, prefix, first) for prefix, child in module.named_modules() if prefix and child._modules
    }
    for copy, original in _copies(module, inside, used, plan.layouts):
        for relative, name in inside[copy].items():
            model = rows[inside[original][relative]]
            if rows[name].source == "trace" and rows[name].layout is None and rows[name].shape == model.shape:
                reason = f"as {model.name}, of which it is a copy"
                rows[name] = dataclasses.replace(model, name=name, reason=reason if model.layout else "")
    return dataclasses.replace(plan, rows=tuple(rows.values()))


def _inside(module: nn.Module, prefix: str, first: Mapping[str, str]) -> dict[str, str]:
    """The first names of a module's parameters by their names in it."""
    names = (name for name, _ in module.named_parameters())
    return {name: first[f"{prefix}.{name}"] for name in names}


def _copies(
    module: nn.Module, inside: Mapping[str, Mapping[str, str]], used: Collection[str], cut: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Names of copies and of their originals."""
    modules = dict(module.named_modules())
    originals = [prefix for prefix, names in inside.items() if any(name in cut for name in names.values())]
    done = ""
    for prefix, names in inside.items():
        if not names or (done and prefix.startswith(f"{done}.")) or any(name in used for name in names.values()):
            continue
        shapes = _shapes(modules[prefix])
        for original in originals:
            if type(modules[original]) is type(modules[prefix]) and _shapes(modules[original]) == shapes:
                done = prefix
                yield prefix, original
                break


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
