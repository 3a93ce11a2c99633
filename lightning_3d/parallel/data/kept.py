"""Blocks that stay gathered between the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class KeptBlocks:
    """Shows a step the gathered parameters of a block only once it has called the block.

    A step that reads them before has a gradient for them left when the block's backward is through: its parameters are
    freed by then and its gradients reduced. So it reads the cut ones, and is told.

    Args:
        blocks: Their parameters at rest.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._resting = {
            block: [
                (part._parameters, name, parameter)
                for part in block.modules()
                for name, parameter in part._parameters.items()
                if parameter is not None
            ]
            for block in blocks
        }
        self._hidden: dict[nn.Module, list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]] = {}
        for block in blocks:
            block.register_forward_pre_hook(self._show)

    def hide(self) -> None:
        """Puts the cut parameters back in place, until their block is called."""
        for block, places in self._resting.items():
            gathered = [
                (table, name, present)
                for table, name, parameter in places
                if (present := table[name]) is not None and present is not parameter
            ]
            if gathered:
                self._hidden[block] = gathered
                for table, name, parameter in places:
                    table[name] = parameter

    def _show(self, block: nn.Module, inputs: Any) -> None:
        for table, name, gathered in self._hidden.pop(block, ()):
            table[name] = gathered
