"""The plain tensors inside whatever an operation takes or gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers; of a DTensor, the local part."""
    # Most values are tensors, and looking through a tree takes longer than asking.
    for leaf in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
        if isinstance(leaf, DTensor):
            yield leaf._local_tensor
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def total_bytes(value: object) -> int:
    """Returns the bytes of all tensors in nested containers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in plain_tensors(value))
