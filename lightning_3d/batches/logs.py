"""Values that ``self.log`` is given inside micro-batches: collected, combined once, logged once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_3d.batches.metrics import MetricState, batch_of, computed, joined, set_batch

# Lightning's order of log's arguments after self, name and value, for calls that pass them by position.
_POSITIONAL = tuple(signature(LightningModule.log).parameters)[3:]


def log_options(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns by name all that ``log`` was given after name and value."""
    return options | dict(zip(_POSITIONAL, args, strict=False))


def reduction_name(reduce_fx: str | Callable[[Any], Any]) -> str:
    """Returns the name of a ``reduce_fx``, which Lightning takes as a name or as torch's function."""
    return reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of ``log``.

    Attributes:
        hook: Lightning's name of the hook that runs.
        name: The name that is logged.
        value: What is logged.
        options: What ``log`` was given besides, by name.
        shown: What a metric shows for its last call.
        state: What that call has told a metric that has states.
    """

    hook: str
    name: str
    value: Any
    options: Mapping[str, Any]
    shown: Any = None
    state: MetricState | None = None

    @classmethod
    def of(cls, module: LightningModule, name: str, value: Any, *args: Any, **options: Any) -> LogCall:
        """Returns a call with the arguments of ``module.log``; a plain tensor as it is now."""
        hook, given = str(module._current_fx_name), log_options(args, options)
        shown: Any = value._forward_cache if isinstance(value, Metric) else None
        on_step = given.get("on_step")
        is_shown = hook == "training_step" if on_step is None else on_step
        state = batch_of(value) if isinstance(value, Metric) and shown is not None and is_shown else None
        return cls(hook, name, _as_now(value), given, shown, state)

    def make(self, module: LightningModule) -> None:
        """Makes the call."""
        if isinstance(self.value, Metric):
            self.value._forward_cache = self.shown
            set_batch(self.value, self.state)
        module.log(self.name, self.value, **self.options)


@dataclass(slots=True)
class _Entry:
    first: LogCall
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sized: bool = True
    shown: Any = None
    states: list[MetricState] = field(default_factory=list)


class LogCollector:
    """Collects what a LightningModule logs while its micro-batches run.

    Lightning counts one logged value per batch. Values of micro-batches are therefore combined by their own
    ``reduce_fx`` (mean: weighted by samples, sum: added, min, max) and handed to Lightning once. A metric gathers its
    micro-batches itself; what it shows for one step is computed from what all of them have told it. Those without
    states of their own, as compositions, show a mean.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}

    def add(self, call: LogCall, size: int | None) -> None:
        """Takes a call.

        Args:
            call: Made while a micro-batch ran.
            size: Samples of that micro-batch; None if it is the whole batch, whose size Lightning finds.
        """
        entry = self._entries.setdefault((call.hook, call.name), _Entry(call))
        value = call.value
        if isinstance(value, Metric):
            value = entry.shown = call.shown
            if call.state is not None:
                entry.states.append(call.state)
            if not isinstance(value, Tensor) or value.numel() != 1:
                return
        entry.values.append(value.detach() if isinstance(value, Tensor) else value)
        own = call.options.get("batch_size")
        size = size if own is None else own
        entry.sizes.append(1 if size is None else size)
        entry.sized = size is not None

    def combined(self) -> list[LogCall]:
        """Returns one call for all of one name, and forgets them."""
        calls = [_one_call(entry) for entry in self._entries.values()]
        self._entries.clear()
        return calls


def _as_now(value: Any) -> Any:
    # Nothing of the step: who watches its functions must not count these.
    with torch._C.DisableTorchFunction():
        if isinstance(value, (int, float)):
            # In the dtype that a step of this precision gives to numbers.
            return torch.tensor(value, dtype=torch.get_default_dtype())
        return value.detach().clone() if type(value) is Tensor else value


def _one_call(entry: _Entry) -> LogCall:
    first = entry.first
    if isinstance(first.value, Metric):
        # Its last call saw one micro-batch.
        if len(entry.states) > 1:
            state = joined(first.value, entry.states)
            return replace(first, shown=computed(first.value, state, synced=False), state=state)
        shown = _combined(entry.values, entry.sizes, "mean") if entry.values else entry.shown
        return replace(first, shown=shown)
    value = _combined(entry.values, entry.sizes, first.options.get("reduce_fx", "mean"))
    size = {"batch_size": sum(entry.sizes)} if entry.sized else {}
    return replace(first, value=value, options={**first.options, **size})


def _combined(values: list[Any], sizes: list[int], reduce_fx: str | Callable[[Any], Any]) -> Any:
    stacked = torch.stack([_as_float(value) for value in values])
    name = reduction_name(reduce_fx)
    if name in ("sum", "min", "max"):
        reduced: Tensor = getattr(stacked, name)()
        return reduced
    # Values that stand for no sample at all are a plain mean, which then counts as little.
    weights = torch.tensor(sizes if any(sizes) else [1] * len(sizes), dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights).sum() / weights.sum()


def _as_float(value: Any) -> Tensor:
    tensor = torch.as_tensor(value)
    return (tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())).reshape(())
