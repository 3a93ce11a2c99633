"""What one batch alone has told a metric: kept by its ``forward``, joined over micro-batches, computed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean

_BATCH = "_mesh_3d_batch"
# What a metric holds beside its states, and what it goes by when it computes.
_CACHES = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync")


@dataclass(frozen=True, slots=True)
class MetricState:
    """The states of a metric; pickles as bytes, so that its tensors travel whatever becomes of others.

    Attributes:
        states: Tensors, or lists of tensors and of whatever else a metric keeps of a sample, by name.
        updates: Calls that made them.
    """

    states: Mapping[str, Any]
    updates: int = 1

    @classmethod
    def of(cls, metric: Metric) -> MetricState:
        """Returns the states of a metric as they are now; their tensors are its own."""
        states = {name: tree_map_only(Tensor, Tensor.detach, getattr(metric, name)) for name in metric._defaults}
        return cls(states, metric._update_count)

    @classmethod
    def empty(cls, metric: Metric) -> MetricState:
        """Returns the states of a metric that was told nothing."""
        states: dict[str, Any] = {
            name: value.to(metric.device, copy=True) if isinstance(value, Tensor) else []
            for name, value in metric._defaults.items()
        }
        return cls(states, 0)

    def put(self, metric: Metric) -> None:
        """Makes a metric hold them."""
        for name, value in self.states.items():
            setattr(metric, name, tree_map_only(Tensor, lambda each: each.to(metric.device), value))

    def __reduce__(self) -> tuple[Any, ...]:
        states = tree_map_only(Tensor, Tensor.cpu, dict(self.states))
        return _unpickled, (pickle.dumps((states, self.updates)),)


def joined(metric: Metric, parts: Sequence[MetricState]) -> MetricState:
    """Returns the states of several parts of a batch as one, by the reductions that torchmetrics uses between ranks."""
    if len(parts) == 1:
        return parts[0]
    updates = sum(part.updates for part in parts)
    together: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        values = [part.states[name] for part in parts]
        if isinstance(values[0], list):
            together[name] = [element for value in values for element in value]
            continue
        stacked = torch.stack(values)
        if reduction == dim_zero_mean:
            stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        together[name] = stacked if reduction is None else reduction(stacked)  # type: ignore[operator]
    return MetricState(together, updates)


def note_batch(metric: Metric) -> None:
    """Keeps what the batch alone has told a metric; called while its ``forward`` computes the value of the batch."""
    if metric._defaults:
        vars(metric)[_BATCH] = MetricState.of(metric)


def set_batch(metric: Metric, state: MetricState | None) -> None:
    """Makes a state the one that is known of the last batch."""
    vars(metric)[_BATCH] = state


def batch_of(metric: Metric) -> MetricState | None:
    """Returns what the last batch alone has told a metric; None if it has no states of its own."""
    state: MetricState | None = vars(metric).get(_BATCH)
    return state


def forget_batch(metric: Metric) -> None:
    """Leaves nothing of `note_batch` in a metric."""
    vars(metric).pop(_BATCH, None)


def is_in_forward(metric: Metric) -> bool:
    """Returns whether a metric is about to compute the value of one batch for its ``forward``."""
    return not metric._should_unsync


def computed(metric: Metric, state: MetricState, *, synced: bool) -> Any:
    """Returns what a metric computes from other states; it keeps its own.

    Args:
        metric: The metric.
        state: Taken instead of its own.
        synced: Join the states of other ranks; a collective. Else those of this one alone.
    """
    own, caches = MetricState.of(metric), {name: vars(metric)[name] for name in _CACHES if name in vars(metric)}
    try:
        state.put(metric)
        metric._computed = None
        metric._update_count = max(state.updates, 1)
        # As torchmetrics does for the value of a batch.
        metric._to_sync, metric._should_unsync = synced, synced
        return metric.compute()
    finally:
        own.put(metric)
        vars(metric).update(caches)


def _unpickled(content: bytes) -> MetricState:
    # Its own process of the same run has written it.
    return MetricState(*pickle.loads(content))
