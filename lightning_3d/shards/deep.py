"""``copy.deepcopy`` of a tensor that holds a part: torch's own takes a part inside of other memory for all of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Returns what `Tensor.__deepcopy__` does: as a parameter or not, with its gradient and what users wrote on it.

    Args:
        tensor: The tensor; its class has clones of its own.
        memo: What is copied already.

    Raises:
        RuntimeError: It has history.
    """
    if has_torch_function_unary(tensor):
        seen: Tensor = handle_torch_function(deep_copy, (tensor,), tensor, memo)
        return seen
    if id(tensor) in memo:
        known: Tensor = memo[id(tensor)]
        return known
    if not tensor.is_leaf:
        raise RuntimeError("only tensors without history can be copied by copy.deepcopy: detach() it first")
    with torch.no_grad():
        copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
    copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = deep_copy(tensor.grad, memo)
    vars(copied).update(copy.deepcopy(vars(tensor), memo))
    return copied
