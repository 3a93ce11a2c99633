"""``load_state_dict`` of a module that is cut, or of a copy of it: whole tensors find their places."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.packed import PackedTensor
from lightning_3d.shards.absent import Absent, form_of
from lightning_3d.shards.alike import alike, is_part, whole_shape


def serve_loading(module: nn.Module) -> None:
    """Has ``load_state_dict`` of a module and of its parts take whole tensors, and those that lie as its own do.

    Args:
        module: A module whose parameters are at rest.
    """
    for part in module.modules():
        if any(map(is_part, part._parameters.values())):
            part.register_load_state_dict_pre_hook(_fit)


def _fit(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        value = state.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and is_part(parameter):
            state[f"{prefix}{name}"] = _fitted(value, parameter)


def _fitted(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a value as the parameter lies here; one of another shape as it is, for torch to complain of."""
    if isinstance(value, PackedTensor):
        return value.shards
    if whole_shape(value) != whole_shape(parameter):
        return value
    if isinstance(parameter, Absent):
        return form_of(parameter)
    return value if isinstance(value, DTensor) else alike(value.detach(), parameter)
