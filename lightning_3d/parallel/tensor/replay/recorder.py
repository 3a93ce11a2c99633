"""Recording a block: every plain call is written down, and what cannot mean the same later is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.parallel.tensor.replay.modes import PlainCalls
from lightning_3d.parallel.tensor.replay.surroundings import Surroundings
from lightning_3d.parallel.tensor.replay.writer import Unwritable, Writer

# Questions whose answers follow from shapes, strides and dtypes alone.
_METADATA = frozenset((
    "__hash__", "__len__", "can_cast", "dim", "dim_order", "element_size", "get_device", "get_default_dtype",
    "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg",
    "is_pinned", "is_same_size", "is_shared", "is_signed", "ndimension", "nelement", "numel", "promote_types",
    "result_type", "size", "stride",
))  # fmt: skip
# The shapes of their results depend on values.
_SIZED_BY_VALUES = frozenset((
    "argwhere", "bincount", "combinations", "masked_select", "nonzero", "unique", "unique_consecutive", "unique_dim",
))  # fmt: skip
# They give back what they were given if there is nothing to do.
_MAYBE_NOTHING = frozenset((
    "contiguous", "to", "float", "half", "bfloat16", "double", "type", "type_as", "dropout",
))  # fmt: skip


class Recorder(PlainCalls):
    """Writes down what a block asks of torch.

    Args:
        writer: Knows the names of the block's inputs and of its parameters and buffers.
        surroundings: Torch's state around the block.

    Attributes:
        refusal: The first reason why the block cannot be replayed.
        switches_grad: Whether gradients are turned off and on inside.
    """

    def __init__(self, writer: Writer, surroundings: Surroundings) -> None:
        super().__init__()
        self.refusal: str | None = None
        self.switches_grad = False
        self._writer = writer
        self._surroundings = surroundings
        self._grad = surroundings.grad

    def refuse(self, reason: str) -> None:
        """Notes why the block cannot be replayed."""
        if self.refusal is None:
            self.refusal = reason

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call and writes it down."""
        if self.refusal is None:
            self._check_surroundings()
        result = function(*args, **kwargs)
        if self.refusal is None:
            name = getattr(function, "__name__", type(function).__name__)
            try:
                self._write(name, function, args, kwargs, result)
            except Unwritable as reason:
                self.refuse(f"{name}: {reason}")
        return result

    def finish(self) -> None:
        """Called after the block."""
        if self.refusal is None:
            self._check_surroundings()
        if self._grad is not self._surroundings.grad:
            self.refuse("it leaves gradients switched")

    def _check_surroundings(self) -> None:
        if torch.is_grad_enabled() is not self._grad:
            self.refuse("it calls a custom autograd function, or a reentrant checkpoint")
            return
        change = self._surroundings.changed()
        if change is not None:
            self.refuse(change)

    def _write(self, name: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if function is torch._C._set_grad_enabled:
            self._grad, self.switches_grad = args[0], True
        elif name == "__get__":
            if function.__self__.__name__ == "grad":
                raise Unwritable("it reads the gradient of a tensor")
            if not isinstance(result, Tensor):
                return
        elif name == "__setitem__":
            pass
        elif _holds_tensor(result):
            self._check_sizes(name, args, kwargs)
            if args and result is args[0] and name in _MAYBE_NOTHING and not _in_place(name, args, kwargs):
                return
        elif name in _METADATA:
            return
        else:
            raise Unwritable("its result is no tensor, so that the block may depend on values")
        self._writer.call(function, args, kwargs, result)

    def _check_sizes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        by_values = (
            name in _SIZED_BY_VALUES
            or (name == "where" and len(args) + len(kwargs) == 1)
            or (name == "one_hot" and (*args[1:], *kwargs.values()) in ((), (-1,)))
            or (
                name == "repeat_interleave"
                and "output_size" not in kwargs
                and _any_tensor((*args[1:], *kwargs.values()))
            )
            or (name == "tensor_split" and _any_tensor((*args[1:], *kwargs.values())))
            or (name == "__getitem__" and _is_mask(args[1]))
        )
        if by_values:
            raise Unwritable("the size of its result depends on values")


def _holds_tensor(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(_holds_tensor(item) for item in result)
    return isinstance(result, Tensor)


def _in_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("inplace") or (name == "dropout" and len(args) > 3 and args[3]))


def _any_tensor(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _is_mask(index: Any) -> bool:
    places = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8) for place in places)
