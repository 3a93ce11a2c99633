"""Calls of local regions: inputs are copied, weights are local, outputs are summed."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError
from lightning_3d.graph.calls import Call, around_forward
from lightning_3d.parallel.tensor.regions.plan import Output, Region
from lightning_3d.parallel.tensor.regions.trial import holding
from lightning_3d.shards import nodes
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.partial import divided
from lightning_3d.shards.rules.entering import entered
from lightning_3d.shards.tensor import ShardTensor


def run_regions(module: nn.Module, regions: Iterable[Region], group: ShardGroup) -> None:
    """Makes modules run as local regions, inside all hooks of their calls.

    Args:
        module: The whole module, whose parameters show shards (cut) or plain tensors (replicated) while a step runs.
            Where they show DTensors no step runs, and calls are left alone.
        regions: What was proved.
        group: The tensor-parallel ranks.
    """
    for region in regions:
        child = module.get_submodule(region.module)
        around_forward(child, RegionCalls(child, region, group))


class RegionCalls:
    """Handles the calls of one region.

    Args:
        module: The region's module.
        region: What was proved of it.
        group: The tensor-parallel ranks.
    """

    def __init__(self, module: nn.Module, region: Region, group: ShardGroup) -> None:
        self._module = module
        self._region = region
        self._group = group

    def __call__(self, call: Call) -> Any:
        """Runs one call.

        Raises:
            ModuleError: It returned something of another structure than where it was proved.
        """
        places = [
            (child, name)
            for child in self._module.modules()
            for name, value in child._parameters.items()
            if value is not None
        ]
        shown = [getattr(owner, name) for owner, name in places]
        if any(isinstance(value, DTensor) for value in shown):
            return call()
        weights = [
            (owner._parameters, name, self._weight(value)) for (owner, name), value in zip(places, shown, strict=True)
        ]
        args, kwargs = pytree.tree_map_only(Tensor, self._input, (call.args, call.kwargs))
        with holding(weights):
            output = call.function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(output)
        kinds = self._region.outputs[self._module.training]
        if len(leaves) != len(kinds):
            raise ModuleError(
                f"{self._region.module} returned {len(leaves)} values, and {len(kinds)} when it was planned.",
                valid="as many values in every call",
                fix=f"tensor_plan={{{self._region.module!r}: 'replicate'}}",
            )
        return pytree.tree_unflatten(
            [self._output(leaf, kind) for leaf, kind in zip(leaves, kinds, strict=True)], structure
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionCalls:
        """A copy of the module runs on the same ranks."""
        return RegionCalls(copy.deepcopy(self._module, memo), self._region, self._group)

    def _weight(self, value: Tensor) -> Tensor:
        return value._local if isinstance(value, ShardTensor) else entered(value, self._group)

    def _input(self, value: Tensor) -> Tensor:
        return entered(gathered(value) if isinstance(value, ShardTensor) else value, self._group)

    def _output(self, value: Any, kind: Output) -> Any:
        if kind == "sum":
            return nodes.reduce(value, self._group)
        # Every rank has the whole gradient of it, and inputs add the ranks' gradients up.
        return divided(value, self._group) if isinstance(value, Tensor) and value.requires_grad else value
