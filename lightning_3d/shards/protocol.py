"""Lets a function on plain tensors take part in torch's function protocol, as one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

_NOT_IN_PLACE = frozenset({"__init__", "__int__", "__index__", "__iter__", "__invert__"})
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def one_call(
    function: Callable[Concatenate[Tensor, _Rest], _Result],
) -> Callable[Concatenate[Tensor, _Rest], _Result]:
    """Shows a function to a TorchFunctionMode as one call, whose inside it never sees.

    Args:
        function: Its first argument is the tensor that the protocol asks.
    """

    @functools.wraps(function)
    def call(value: Tensor, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        if has_torch_function_unary(value):
            result: _Result = handle_torch_function(call, (value,), value, *args, **kwargs)
            return result
        return function(value, *args, **kwargs)

    return call


def applied(function: Any, *args: Any) -> Any:
    """Applies an autograd function, whose ``apply`` torch leaves without types."""
    return function.apply(*args)


def storage_key(tensor: Tensor) -> int:
    """Returns what identifies a tensor's storage while it lives; asked in a way that no mode of functions hears."""
    with torch._C.DisableTorchFunction():
        key: int = tensor.untyped_storage()._cdata
    return key


def writes_to_first(function: Any) -> bool:
    """Returns whether a function of torch changes its first argument."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") and name not in _NOT_IN_PLACE
    return name == "__setitem__" or in_place or (name.endswith("_") and not name.endswith("__"))
