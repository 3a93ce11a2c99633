"""Values that ``self.log`` is given inside micro-batches: collected, combined once, logged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

# Lightning's order of log's arguments after the value, for calls that pass them by position.
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


@dataclass(slots=True)
class _Entry:
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class LogCollector:
    """Collects what a LightningModule logs while its micro-batches run.

    Lightning counts one logged value per batch. Values of micro-batches are therefore combined by their own
    ``reduce_fx`` (mean: weighted by samples, sum: added, min, max) and handed to Lightning once.

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
            value = _combined(entry.values, entry.sizes, options.get("reduce_fx", "mean"))
            if not isinstance(value, Metric):
                options["batch_size"] = sum(entry.sizes)
            self._module.log(name, value, **options)
        self._entries.clear()

    def collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands in for ``module.log`` while micro-batches run."""
        options.update(zip(_POSITIONAL, args, strict=False))
        hook = str(self._module._current_fx_name)
        entry = self._entries.setdefault((hook, name), _Entry({"name": name, **options}))
        entry.values.append(value.detach() if isinstance(value, Tensor) else value)
        size = options.get("batch_size")
        entry.sizes.append(self._size if size is None else size)


def _combined(values: list[Any], sizes: list[int], reduce_fx: str | Callable[[Any], Any]) -> Any:
    if isinstance(values[0], Metric):
        return values[0]
    stacked = torch.stack([_as_float(value) for value in values])
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
    if name in ("sum", "min", "max"):
        reduced: Tensor = getattr(stacked, name)()
        return reduced
    weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights).sum() / weights.sum()


def _as_float(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return (tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())).reshape(())
