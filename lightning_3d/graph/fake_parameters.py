"""Parameters without values in the place of a module's own, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def fake_parameters(module: nn.Module) -> Iterator[dict[int, str]]:
    """Context in which every parameter of a module is a FakeTensor.

    Tied parameters stay tied, frozen ones frozen. Buffers and other tensors stay as they are, but those on the meta
    device are fake too; what was on the meta device is on the CPU. Only what meets a parameter has no values then.

    Args:
        module: The whole module, real or on the meta device.

    Yields:
        The first name of each parameter, by the id of its fake one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for child in module.modules():
        places: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, vars(child))
        for place in places:
            for key, value in place.items():
                if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_meta):
                    if id(value) not in fakes:
                        fakes[id(value)] = _fake(value, mode)
                    replaced.append((place, key, value))
    try:
        for place, key, value in replaced:
            place[key] = fakes[id(value)]
        yield {id(parameter): name for name, parameter in module.named_parameters()}
    finally:
        for place, key, value in replaced:
            place[key] = value


def _fake(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.is_meta else value.device)
    if not isinstance(value, nn.Parameter):
        return fake
    parameter = nn.Parameter(fake, requires_grad=value.requires_grad)
    # What users have written on it.
    vars(parameter).update(vars(value))
    return parameter
