"""What a module keeps while it is cut over the tensor axis: its group, whether a step runs, its partial gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.parallel.tensor.reading.leaves import Activity, PartialSum, read_leaf, slots_of
from lightning_3d.shards.group import ShardGroup


class TensorState:
    """The tensor axis of one module.

    Attributes:
        group: The ranks that it is cut over.
        activity: Entered while a step runs, forward and backward: parameters then read as leaves.

    Args:
        module: The module, its classes swapped.
        group: The ranks.
        activity: What its properties ask.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, group: ShardGroup, activity: Activity, *, device: torch.device) -> None:
        self.group = group
        self.activity = activity
        self._module = module
        self._device = device
        self._partial: tuple[PartialSum, ...] = ()
        self.settle()

    def read(self, module: nn.Module, name: str) -> Tensor:
        """Returns the plain local leaf of a parameter, whatever reading the attribute shows."""
        return read_leaf(module, name)

    def visit(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, a use of the module; with whole results if no step of it runs."""
        return call() if self.activity else self._visit(call)

    # A caller may be compiled, and would compile everything inside.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _visit(self, call: Callable[[], Any]) -> Any:
        with self.activity:
            return whole(call())

    def settle(self) -> None:
        """Remembers the parameters as the optimizer sees them: called again when the data axis has replaced them."""
        partial = {}
        for child in self._module.modules():
            for name, slot in slots_of(child).items():
                if slot.partial_sum is not None:
                    slot.partial_sum.resting = child._parameters[name]
                    partial[id(slot)] = slot.partial_sum
        self._partial = tuple(partial.values())

    def complete_partial_gradients(self) -> None:
        """Sums the partial gradients over the ranks, all at once: after the last backward, before anything reads them.

        A collective call if there are any. Gradients that are not zeroed afterwards become summands of the next sum.
        """
        waiting: dict[torch.dtype, list[Tensor]] = {}
        for partial_sum in self._partial:
            gradient = partial_sum.local_gradient()
            if gradient is not None and not partial_sum.complete:
                partial_sum.complete = True
                waiting.setdefault(gradient.dtype, []).append(gradient)
        for gradients in waiting.values():
            self._sum(gradients)

    def _sum(self, gradients: Sequence[Tensor]) -> None:
        with torch.no_grad():
            together = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
            parts = self.group.sum(together).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
