"""Counting the floating point operations of what runs, with or without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Operations of products in groups, such as experts: every row of a group's part meets one matrix."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


# torch counts attention on every device but this, and no products in groups.
_NOT_IN_TORCH: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
        _aten._grouped_mm: _grouped,
    }
)


class CountsFlops(TorchDispatchMode):
    """Hands the operations of each matrix product, convolution and attention to a function.

    torch's own counter follows the modules too, with hooks on their tensors, and costs more than a fake run.

    Args:
        add: Is told a number of operations, and what computes them.
    """

    def __init__(self, add: Callable[[float, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add
        self._formulas: Mapping[Any, Callable[..., Any]] = {**_NOT_IN_TORCH, **flop_registry}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes, and counts by torch's formulas."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self._add(float(formula(*args, **kwargs, out_val=output)), str(func._overloadpacket))
        return output
