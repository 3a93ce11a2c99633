"""Values that ``self.log`` is given inside micro-batches: collected, combined once, logged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

# Lightning's order of log's arguments after self, name and value, for calls that pass them by position.
_POSITIONAL = tuple(signature(LightningModule.log).parameters)[3:]


def log_options(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns by name all that ``log`` was given after name and value."""
    return options | dict(zip(_POSITIONAL, args, strict=False))


def reduction_name(reduce_fx: str | Callable[[Any], Any]) -> str:
    """Returns the name of a ``reduce_fx``, which Lightning takes as a name or as torch's function."""
    return reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__


@dataclass(slots=True)
class _Entry:
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    metric: Metric | None = None


class LogCollector:
    """Collects what a LightningModule logs while its micro-batches run.

    Lightning counts one logged value per batch. Values of micro-batches are therefore combined by their own
    ``reduce_fx`` (mean: weighted by samples, sum: added, min, max) and handed to Lightning once. A metric gathers its
    micro-batches itself; only what it shows for one step is combined, as a mean.

    Args:
        module: The module whose ``log`` is listened to.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._size = 0

    def microbatch(self, size: int) -> None:
        """Says how many samples the micro-batch that runs next has."""
        self._size = size

    def flush(self) -> None:
        """Hands every combined value to Lightning's own ``log``."""
        for entry in self._entries.values():
            options = dict(entry.options)
            name = options.pop("name")
            value = entry.metric
            if value is None:
                value = _combined(entry.values, entry.sizes, options.get("reduce_fx", "mean"))
                options["batch_size"] = sum(entry.sizes)
            elif entry.values:
                # The metric shows its last call, which saw one micro-batch, as the value of the step.
                value._forward_cache = _combined(entry.values, entry.sizes, "mean")
            self._module.log(name, value, **options)
        self._entries.clear()

    def collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands in for ``module.log`` while micro-batches run."""
        options = log_options(args, options)
        hook = str(self._module._current_fx_name)
        entry = self._entries.setdefault((hook, name), _Entry({"name": name, **options}))
        if isinstance(value, Metric):
            entry.metric = value
            value = value._forward_cache
            if not isinstance(value, Tensor) or value.numel() != 1:
                return
        entry.values.append(value.detach() if isinstance(value, Tensor) else value)
        size = options.get("batch_size")
        entry.sizes.append(self._size if size is None else size)


def _combined(values: list[Any], sizes: list[int], reduce_fx: str | Callable[[Any], Any]) -> Any:
    stacked = torch.stack([_as_float(value) for value in values])
    name = reduction_name(reduce_fx)
    if name in ("sum", "min", "max"):
        reduced: Tensor = getattr(stacked, name)()
        return reduced
    weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights).sum() / weights.sum()


def _as_float(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return (tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())).reshape(())
