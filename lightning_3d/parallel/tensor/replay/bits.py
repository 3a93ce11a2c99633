"""Comparing tensors to the bit."""

from __future__ import annotations

from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are of one kind and equal everywhere, not-a-numbers included."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
