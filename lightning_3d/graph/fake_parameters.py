"""Parameters without values in the place of a module's own, for a while or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

# Where something stood, and what.
_Place = tuple[dict[str, Any], str, Any]


@contextmanager
def fake_parameters(module: nn.Module) -> Iterator[dict[int, str]]:
    """Context in which every parameter of a module is a FakeTensor.

    Tied parameters stay tied, frozen ones frozen. Buffers and other tensors stay as they are, but those on the meta
    device are fake too. All are where the module says it is, on the CPU if it is on the meta device. Only what meets a
    parameter has no values then.

    Args:
        module: The whole module, real or on the meta device.

    Yields:
        The first name of each parameter, by the id of its fake one.
    """
    replaced = replace_by_fakes(module, FakeTensorMode(allow_non_fake_inputs=True))
    try:
        yield {id(parameter): name for name, parameter in module.named_parameters()}
    finally:
        for place, key, value in replaced:
            place[key] = value


def replace_by_fakes(module: nn.Module, mode: FakeTensorMode) -> list[_Place]:
    """Puts FakeTensors in the place of every parameter, and of every tensor on the meta device.

    Args:
        module: The whole module, real or on the meta device.
        mode: Makes them.

    Returns:
        What stood where before.
    """
    device = getattr(module, "device", torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not _has_to_be_fake(value):
            return value
        if id(value) not in fakes:
            fakes[id(value)] = _fake(value, mode, device)
        return fakes[id(value)]

    replaced: list[_Place] = []
    for child in module.modules():
        places: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, vars(child))
        replaced += [(place, key, value) for place in places for key, value in place.items() if _holds_any(value)]
    for place, key, value in replaced:
        # Lists, as torch's recurrent layers have of their weights.
        place[key] = [fake(each) for each in value] if isinstance(value, list) else fake(value)
    return replaced


def _has_to_be_fake(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_meta)


def _holds_any(value: Any) -> bool:
    return any(map(_has_to_be_fake, value)) if isinstance(value, list) else _has_to_be_fake(value)


def _fake(value: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
    if not isinstance(value, nn.Parameter):
        return fake
    parameter = nn.Parameter(fake, requires_grad=value.requires_grad)
    # What users have written on it.
    vars(parameter).update(vars(value))
    return parameter
