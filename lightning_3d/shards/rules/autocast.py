"""What autocast does to operations that are made of others here: torch knows them by their names only."""

from __future__ import annotations

import torch
from torch import Tensor


def autocasts(value: Tensor) -> bool:
    """Returns whether autocast is on where a tensor is."""
    kind = value.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def widened_by_autocast(value: Tensor, *only: str) -> Tensor:
    """Returns an operand in 32 bits if autocast is on, which computes the operation in them.

    Args:
        value: The operand.
        only: Types of devices whose autocast does; of all devices by default.
    """
    if value.dtype not in (torch.bfloat16, torch.float16) or (only and value.device.type not in only):
        return value
    return value.float() if autocasts(value) else value
