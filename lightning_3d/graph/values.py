"""Values where there are none: what a fake run goes on with when a step reads a hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

Function = Callable[..., Any]

_READERS = ("numpy", "tolist", "__array__", "__dlpack__")
_SCALARS = ("__bool__", "is_nonzero")
_FINITE: Mapping[Function, bool] = MappingProxyType(
    {
        **dict.fromkeys((torch.isfinite, Tensor.isfinite), True),
        **dict.fromkeys((torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), False),
    }
)


# Where classes of tensors come from that stand for others in a fake run.
_LIBRARIES = ("torch", "lightning_3d")


def is_hidden(value: object) -> bool:
    """Returns whether a value is a tensor without values; those of a user's own class have some."""
    if not isinstance(value, Tensor):
        return False
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        return False
    return kind is FakeTensor or kind.__module__.partition(".")[0] in _LIBRARIES


def reads_values(function: Function, failure: Exception) -> bool:
    """Returns whether a function failed on a fake tensor because it needs its values."""
    if isinstance(failure, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    return isinstance(failure, RuntimeError) and _name(function) in _READERS


def is_unforetellable(failure: Exception) -> bool:
    """Returns whether an operator failed because nobody has said what it returns for fake tensors."""
    named = isinstance(failure, (UnsupportedOperatorException, UnsupportedFakeTensorException))
    return named or "no fake impl registered" in str(failure)


def all_finite(function: Function, args: tuple[Any, ...]) -> Tensor | None:
    """Returns the answer of ``isfinite`` and its like for a hidden tensor, with values; None for other functions."""
    if function not in _FINITE or not args or not is_hidden(args[0]):
        return None
    return torch.full(tuple(args[0].shape), _FINITE[function], device=args[0].device)


def with_positions(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Function, tuple[Any, ...]] | None:
    """Returns a call in which masks that have values are positions; None if there are no such masks.

    Which elements a mask of the batch takes is known, so nothing hidden is read.
    """
    name = _name(function)
    if name == "masked_select":
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        if mask is None or is_hidden(mask):
            return None
        tensor, mask = torch.broadcast_tensors(args[0], mask)
        return Tensor.__getitem__, (tensor, mask.nonzero(as_tuple=True))
    if name not in ("__getitem__", "__setitem__"):
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(_is_mask(part) for part in index):
        return None
    flat: list[Any] = []
    for part in index:
        flat.extend(part.nonzero(as_tuple=True) if _is_mask(part) else [part])
    return function, (args[0], tuple(flat), *args[2:])


def made_up(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function on hidden tensors whose elements are 1, or True.

    As the truth of one tensor False is taken: code asks for what is wrong more often than for what is right.
    """
    if _name(function) in _SCALARS:
        return False
    for kinds in (_is_discrete, is_hidden):
        known_args, known_kwargs = pytree.tree_map(
            lambda leaf, kinds=kinds: _ones(leaf) if kinds(leaf) else leaf, (args, kwargs)
        )
        try:
            masked = with_positions(function, known_args, known_kwargs)
            if masked is not None:
                return masked[0](*masked[1])
            result = function(*known_args, **known_kwargs)
        except Exception as failure:
            if not reads_values(function, failure):
                raise
        else:
            return False if result is True and _name(function) == "item" else result
    raise AssertionError("a function of tensors that have values reads values")


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and not is_hidden(value)


def _is_discrete(value: Any) -> bool:
    return is_hidden(value) and not value.is_floating_point()


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)


def _name(function: Function) -> str:
    return getattr(function, "__name__", "")
