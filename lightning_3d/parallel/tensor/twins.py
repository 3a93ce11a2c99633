"""Modules that no step uses, as an average of the weights or a frozen copy: they are cut as what they are a copy of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from lightning_3d.graph.copies import unused_copies
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
    """Returns a plan in which copies of modules that no step uses are cut as their originals.

    What the user's `tensor_plan` says of a copy's parameters counts.

    Args:
        plan: What the step has shown.
        module: The whole module.
        parameters: Its parameters.
        used: First names of those that the step uses.
    """
    rows = {row.name: row for row in plan.rows}
    for name, original in unused_copies(module, parameters, used).items():
        model = rows[original]
        if rows[name].source == "trace" and rows[name].layout is None and rows[name].shape == model.shape:
            reason = f"as {model.name}, of which it is a copy"
            rows[name] = dataclasses.replace(model, name=name, reason=reason if model.layout else "")
    return dataclasses.replace(plan, rows=tuple(rows.values()))
