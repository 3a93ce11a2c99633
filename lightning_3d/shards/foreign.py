"""Custom autograd functions that were handed a shard: their backward would be lost without a sign."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import ModuleError
from lightning_3d.shards.tensor import ShardTensor

_APPLY = vars(torch.autograd.Function)["apply"].__func__.__code__


def check_no_foreign_function(args: Iterable[Any]) -> None:
    """Refuses shards that a custom autograd function was applied to, inside its forward.

    Called where gradients are off, as they are there. ``apply`` knows of plain tensors only: to it, a shard is a
    tensor that wants no gradient.

    Args:
        args: Arguments of the operation.

    Raises:
        ModuleError: Names the function.
    """
    shards = [arg for arg in args if isinstance(arg, ShardTensor)]
    check_not_handed_over(
        shards,
        "a tensor that is cut over the tensor-parallel ranks",
        "tensor_plan={'<module before it>': 'replicate'}, or checkpoint(..., use_reentrant=False) if it is torch's own "
        "checkpoint",
    )


def check_not_handed_over(tensors: Iterable[Tensor], kind: str, fix: str) -> None:
    """Refuses tensors, none of them plain, that a custom autograd function was applied to.

    Args:
        tensors: Arguments of an operation inside of its forward.
        kind: What they are, for the error.
        fix: What helps.

    Raises:
        ModuleError: Names the function.
    """
    asking = [tensor for tensor in tensors if tensor.requires_grad]
    if not asking:
        return
    frame: Any = sys._getframe(1)
    below = frame
    while frame is not None:
        # Parameters are used inside a checkpoint's function too, without being handed to it.
        if frame.f_code is _APPLY and any(tensor is given for tensor in asking for given in frame.f_locals["args"]):
            raise ModuleError(
                f"the custom autograd function {frame.f_locals['cls'].__name__} was given {kind} "
                f"({below.f_code.co_filename}:{below.f_lineno}).",
                fix=fix,
            )
        below, frame = frame, frame.f_back
