"""The metrics of a module, also those that stand in plain collections and not in the module's tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchmetrics import Metric


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns every metric of a module once: in its tree, or in lists, tuples and dicts among its attributes."""
    found = {id(child): child for child in module.modules() if isinstance(child, Metric)}
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, (list, tuple, dict)) and value is not child._modules:
                found |= {id(metric): metric for metric in _held(value, depth=2)}
    return list(found.values())


def _held(value: Any, depth: int) -> Iterator[Metric]:
    if isinstance(value, nn.Module):
        yield from (child for child in value.modules() if isinstance(child, Metric))
    elif depth and isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part, depth - 1)
