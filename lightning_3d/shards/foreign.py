"""Custom autograd functions that were handed a shard: their backward would be lost without a sign."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError
from lightning_3d.shards.tensor import ShardTensor

_APPLY = vars(torch.autograd.Function)["apply"].__func__.__code__


def check_no_foreign_function(args: Iterable[Any]) -> None:
    """Refuses shards that want gradients inside the forward of a custom autograd function.

    Called where gradients are off, as they are there. A shard that was made there wants none. One that does came in
    through ``apply``, which knows of plain tensors only; or it is a weight that the forward finds by itself, as in a
    checkpointed block, and nobody expects its gradients from this function.

    Args:
        args: Arguments of the operation.

    Raises:
        ModuleError: Names the function.
    """
    wanting = {id(arg) for arg in args if isinstance(arg, ShardTensor) and arg._local.requires_grad}
    if not wanting:
        return
    frame: Any = sys._getframe(1)
    below = frame
    while frame is not None:
        if frame.f_code is _APPLY and wanting.intersection(map(id, pytree.tree_leaves(frame.f_locals["args"]))):
            name = frame.f_locals["cls"].__name__
            raise ModuleError(
                f"the custom autograd function {name} was given a tensor that is cut over the tensor-parallel ranks "
                f"({below.f_code.co_filename}:{below.f_lineno}).",
                fix="tensor_plan={'<module before it>': 'replicate'}, or checkpoint(..., use_reentrant=False) if it is "
                "torch's own checkpoint",
            )
        below, frame = frame, frame.f_back
