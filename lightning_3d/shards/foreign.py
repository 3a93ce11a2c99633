"""Custom autograd functions that were handed a shard: their backward would be lost without a sign."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lightning_3d.errors import ModuleError
from lightning_3d.shards.tensor import ShardTensor

_APPLY = torch.autograd.Function.apply.__func__.__code__


def check_no_foreign_function(args: tuple[Any, ...]) -> None:
    """Refuses shards with a history inside the forward of a custom autograd function.

    Called where gradients are off, as they are there. A shard that was made there has no history; one that has came
    in through ``apply``, which knows of plain tensors only.

    Args:
        args: Arguments of the operation.

    Raises:
        ModuleError: Names the function.
    """
    if not any(isinstance(arg, ShardTensor) and arg._local.grad_fn is not None for arg in args):
        return
    frame: Any = sys._getframe(1)
    below = None
    while frame is not None:
        if frame.f_code is _APPLY:
            name = frame.f_locals["cls"].__name__
            line = f"{below.f_code.co_filename}:{below.f_lineno}" if below is not None else "its forward"
            raise ModuleError(
                f"the custom autograd function {name} was given a tensor that is cut over the tensor-parallel ranks "
                f"({line}).",
                fix="tensor_plan={'<module before it>': 'replicate'}, or checkpoint(..., use_reentrant=False) if it is "
                "torch's own checkpoint",
            )
        below, frame = frame, frame.f_back
