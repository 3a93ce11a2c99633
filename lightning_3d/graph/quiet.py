"""Running a step without leaving a trace: metrics, attributes, buffers, randomness and logs are put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.graph.calls import shadow


@contextmanager
def quiet(module: LightningModule, *, keep_log: bool = False) -> Iterator[None]:
    """Context in which calls of the module's steps leave no trace in it.

    Put back at the end: states of torchmetrics, lists and mappings and plain values among the attributes of every
    sub-module, buffers, and torch's CPU generator.

    Args:
        module: The module whose steps run inside.
        keep_log: Leave ``module.log`` alone, for a caller that listens to it itself; else it does nothing inside.
    """
    snapshots = [(child, _attributes(child)) for child in module.modules()]
    metrics = [(child, _metric_state(child)) for child in module.modules() if isinstance(child, Metric)]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    random_state = torch.get_rng_state()
    put_log_back = None if keep_log else shadow(module, "log", _silent)
    try:
        yield
    finally:
        if put_log_back is not None:
            put_log_back()
        torch.set_rng_state(random_state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for metric, state in metrics:
            metric.__dict__.update(state)
        for child, attributes in snapshots:
            _put_back(child, attributes)


def _silent(*args: Any, **kwargs: Any) -> None:
    return None


_PLAIN = (bool, int, float, str, type(None))
_COLLECTIONS = (list, dict, set)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values as they are, collections as shallow copies; torch's own tables and metrics' states are left out."""
    if isinstance(module, Metric):
        return {}
    return {
        key: copy.copy(value) if isinstance(value, _COLLECTIONS) else value
        for key, value in vars(module).items()
        if isinstance(value, (*_PLAIN, *_COLLECTIONS)) and not _is_torch_table(key)
    }


def _is_torch_table(key: str) -> bool:
    return key in ("_parameters", "_buffers", "_modules") or key.endswith("_hooks") or "_hooks_" in key


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    for key, before in attributes.items():
        now = vars(module).get(key)
        if isinstance(before, list) and isinstance(now, list):
            now[:] = before
        elif isinstance(before, (dict, set)) and isinstance(now, type(before)):
            now.clear()
            now.update(before)
        elif now is not before:
            module.__dict__[key] = before


def _metric_state(metric: Metric) -> dict[str, Any]:
    """The states of a metric, copied, and what it remembers of its last call."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    remembered = ("_computed", "_forward_cache", "_update_count", "_update_called")
    return states | {name: vars(metric)[name] for name in remembered if name in vars(metric)}


def _copied(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)
