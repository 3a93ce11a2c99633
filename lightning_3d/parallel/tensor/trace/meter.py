"""Counts what a traced step communicates, block by block, and notes whose gradients could be summed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.graph.observer import Scene
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.tensor.doors import replicated
from lightning_3d.parallel.tensor.regions.plan import Region
from lightning_3d.parallel.tensor.trace.backward import Calls, backward_traffic
from lightning_3d.parallel.tensor.trace.exchanges import Collectives, Exchanges
from lightning_3d.parallel.tensor.trace.shard import TraceGroup
from lightning_3d.shards import nodes
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.rules.entering import entered

# Partial gradients are summed together, which is to stay small beside the weights that are cut.
_SMALL = 4
# The block of all that lies outside of blocks.
_OUTSIDE = ""


class BlockNames:
    """The names of parameters in blocks.

    Args:
        table: The module's parameters.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._first = {name: row.name for row in table.rows for name in row.names}

    def inside(self, block: str) -> list[tuple[str, str]]:
        """Returns each name in a block with the parameter's first name."""
        return [(name, first) for name, first in self._first.items() if name.startswith(f"{block}.")]

    def twins(self, block: str, first: str) -> dict[str, str]:
        """Returns the first names of a block's parameters by those of another block that is alike."""
        return {origin: self._first[block + name.removeprefix(first)] for name, origin in self.inside(first)}


class Meter:
    """The counts of one pass.

    Attributes:
        traffic: Of each block; "" stands for all outside of blocks.
        calls: Is told of the functions that are called.

    Args:
        scene: Knows the names of parameters and modules.
        group: Counts what is asked of it.
    """

    def __init__(self, scene: Scene, group: TraceGroup) -> None:
        self.traffic: dict[str, Collectives] = {}
        self.calls = Calls(scene)
        self._scene = scene
        self._group = group
        # At the doors of blocks.
        self._entering: list[Any] = []
        self._leaving: list[Any] = []
        # What was counted inside of blocks.
        self._inside = Exchanges()
        self._repeated = False
        self._candidates: dict[str, list[frozenset[str]]] = {}
        self._replicated: set[str] = set()

    def call(self, name: str, args: Any, kwargs: Any, made: Callable[[Any, Any], Any]) -> Any:
        """Makes a call of a module, and counts it if it is a block."""
        if name not in self._scene.blocks:
            return made(args, kwargs)
        before, self._repeated = self._group.exchanges, False
        # As at the doors of blocks.
        args, kwargs = pytree.tree_map_only(PartialTensor, replicated, (args, kwargs))
        output = pytree.tree_map_only(PartialTensor, replicated, made(args, kwargs))
        inputs, outputs = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(output)
        self._entering += inputs
        self._leaving += outputs
        if not self._repeated:
            forward = self._group.exchanges - before
            self._inside += forward
            self._count(name, forward, outputs, inputs)
        self._repeated = False
        return output

    def repeated(self, block: str, first: str, twins: Mapping[str, str]) -> None:
        """A block was not computed, since it repeats another.

        Args:
            block: Its name.
            first: The other one.
            twins: Names of its parameters by those of the other's.
        """
        self._repeated = True
        if block == first:
            return
        self.traffic[block] = self.traffic[first]
        self._candidates[block] = [
            frozenset(twins.get(name, name) for name in names) for names in self._candidates[first]
        ]
        self._replicated |= {twins[name] for name in self._replicated & twins.keys()}

    def region(self, region: Region, args: Any, kwargs: Any, made: Callable[[Any, Any], Any]) -> Any:
        """Makes a call of a module that runs on local weights.

        Args:
            region: The module.
            args: Of the call, no shards.
            kwargs: Of the call, no shards.
            made: Makes it.
        """
        group = self._group
        with torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_map_only(Tensor, lambda value: entered(value, group), (args, kwargs))
        leaves, structure = pytree.tree_flatten(made(args, kwargs))
        training = next(child.training for child, name in self._scene.modules.items() if name == region.module)
        with torch._C.DisableTorchFunction():
            leaves = [
                nodes.reduce(leaf, group) if kind == "sum" else leaf
                for leaf, kind in zip(leaves, region.outputs[training], strict=True)
            ]
        return pytree.tree_unflatten(leaves, structure)

    def finish(self, results: Sequence[Any]) -> None:
        """Counts what lies outside of blocks.

        Args:
            results: What the step returned.
        """
        self._count(_OUTSIDE, self._group.exchanges - self._inside, [*results, *self._entering], self._leaving)

    def partial(self, numels: Mapping[str, int], cut: frozenset[str]) -> frozenset[str]:
        """Returns the replicated parameters whose gradients can be summed later, together.

        Args:
            numels: Elements of every parameter.
            cut: Those that are cut.
        """
        limit = sum(numels[name] for name in cut) / _SMALL
        every = {names for found in self._candidates.values() for names in found}
        return frozenset[str]().union(
            *(
                names
                for names in every
                if not names & (self._replicated | cut) and sum(numels[name] for name in names) <= limit
            )
        )

    def _count(self, block: str, forward: Exchanges, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        found = backward_traffic(outputs, inputs, self._scene, self.calls)
        self._candidates.setdefault(block, []).extend(found.candidates)
        self._replicated |= found.replicated
        self.traffic[block] = self.traffic.get(block, Collectives()) + Collectives.of(forward, found.exchanges)
