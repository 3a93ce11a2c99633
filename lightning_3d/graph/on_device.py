"""A module that says it is on a device before it is there, while what it will compute is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import Tensor, nn


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which a module meets batches of its device, while its parameters are still elsewhere.

    Its ``device`` is the one that it will have, and its buffers are there. Parameters stay: what runs the module
    without their values makes them where the module says it is, and a whole module need not fit on one device.

    Args:
        module: The whole module, real or on the meta device.
        device: Where it will run.
    """
    moved: list[tuple[dict[str, Any], str, Tensor]] = []
    before: list[tuple[_DeviceDtypeModuleMixin, torch.device]] = []
    copies: dict[int, Tensor] = {}
    try:
        for child in module.modules():
            if isinstance(child, _DeviceDtypeModuleMixin):
                before.append((child, child._device))
                child._device = device
            places: dict[str, Any] = child._buffers
            for key, buffer in places.items():
                if isinstance(buffer, Tensor) and not buffer.is_meta and buffer.device != device:
                    moved.append((places, key, buffer))
        for place, key, buffer in moved:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.to(device)
            place[key] = copies[id(buffer)]
        yield
    finally:
        for place, key, buffer in moved:
            place[key] = buffer
        for child, own in before:
            child._device = own
