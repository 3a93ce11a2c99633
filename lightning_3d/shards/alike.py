"""Tensors that are held as a parameter is: what a copy of the parameter has on this rank."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from lightning_3d.shards.absent import Absent, Arrivals, absent_parameter
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.resting import Resting


def is_part(tensor: object) -> TypeGuard[Resting | Absent]:
    """Returns whether a tensor between steps is not whole here: other ranks hold parts of it, or all."""
    return isinstance(tensor, Resting | Absent)


def layout_of(tensor: object) -> Layout | None:
    """Returns how the tensor axis cuts a tensor between steps; None if it does not."""
    return tensor._held.layout if isinstance(tensor, Resting) else None


def whole_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape that a tensor has on one device."""
    return tensor._held.shape if isinstance(tensor, Resting) else tensor.shape


def alike(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor, as it holds a parameter of the same shape.

    Dtype, device, whether it trains and what users have written on it are the whole tensor's.

    Args:
        whole: A tensor in the original order, equal on all ranks that hold the parameter.
        parameter: The parameter between steps.
    """
    if isinstance(parameter, Absent):
        part: Tensor = absent_parameter(_parameter(whole), parameter._elsewhere, whole.device, Arrivals())
        return part if isinstance(whole, nn.Parameter) else part.detach()
    if not isinstance(parameter, Resting):
        return whole
    with torch.no_grad():
        part = torch.empty_like(parameter.detach(), dtype=whole.dtype, device=whole.device).copy_(whole)
    if not isinstance(whole, nn.Parameter):
        return part
    made = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(made).update(vars(whole))
    return made


def _parameter(whole: Tensor) -> nn.Parameter:
    return whole if isinstance(whole, nn.Parameter) else nn.Parameter(whole, requires_grad=False)
