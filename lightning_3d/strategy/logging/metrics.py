"""Metrics on a mesh: states meet over the data axis only, and the last stage's are everybody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.batches.metrics import forget_batch, is_in_forward, note_batch
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.metrics import metrics_of
from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.strategy.logging.gathering import gather_tensors
from lightning_3d.strategy.logging.relay import Relay
from lightning_3d.strategy.logging.windows import Windows

# What a metric holds beside its states.
_CACHES = ("_update_count", "_computed", "_forward_cache", "_num_vals_seen")


class MetricDoors:
    """Makes the metrics of a module compute on a mesh what they compute on one device.

    Args:
        module: The user's module.
        data_group: The data axis.
        relay: Sends what is computed to the other ranks of a pipeline; None where there is one stage.
    """

    def __init__(self, module: nn.Module, data_group: dist.ProcessGroup, relay: Relay | None = None) -> None:
        self._module = module
        self._data = _DataAxis(data_group)
        self._relay = relay
        self._opened: list[Callable[[], None]] = []
        self._windows = Windows()
        # Inside, a rank computes for itself: in a step, and where one metric asks another.
        self._alone = False

    def open(self) -> None:
        """Opens the doors of all metrics that have none; some are made while a Trainer runs, as a `MetricTracker`'s."""
        for metric in self._metrics():
            if isinstance(vars(metric).get("compute"), _Compute):
                continue
            if metric.dist_sync_fn is None and metric.process_group is None:
                self._opened.append(shadow(metric, "dist_sync_fn", self._data))
            self._opened.append(shadow(metric, "update", _Update(metric)))
            self._opened.append(shadow(metric, "compute", _Compute(self, metric)))
            self._opened.append(partial(forget_batch, metric))
            self._opened += self._windows.follow(metric)

    def close(self) -> None:
        """Metrics are what they were."""
        while self._opened:
            self._opened.pop()()

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """Context of a micro-batch of a batch; metrics over a window of batches ask for its number."""
        return self._windows.microbatch(index)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which this rank computes for itself: others of its pipeline do something else."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    @contextmanager
    def counting_if_finished(self) -> Iterator[None]:
        """Context of a step that forgets what metrics were given in it, unless it comes to its end.

        A rank of several stages runs a step once for each of them, and only the last one finishes it.
        """
        before = [(metric, _held(metric)) for metric in self._metrics()]
        try:
            yield
        except BaseException:
            for metric, held in before:
                vars(metric).update(held)
            raise

    def whole(self, compute: Callable[[], Any]) -> Any:
        """Returns what ``compute()`` returns on the last stage, whose metrics have seen everything."""
        if self._alone or self._relay is None:
            return compute()
        with self.alone():
            return self._relay.share(compute)

    def _metrics(self) -> list[Metric]:
        return metrics_of(self._module)


class _Update:
    """Stands in for ``update`` of a metric, which sees whole tensors only; a copy has the plain one again."""

    def __init__(self, metric: Metric) -> None:
        self._update = metric.update

    def __call__(self, *args: Any, **options: Any) -> None:
        args, options = whole((args, options))
        self._update(*args, **options)


class _Compute:
    """Stands in for ``compute`` of a metric; a copy of the metric has the plain one again."""

    def __init__(self, doors: MetricDoors, metric: Metric) -> None:
        self._doors = doors
        self._metric = metric
        self._compute = metric.compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_forward(self._metric):
            note_batch(self._metric)
            return self._compute(*args, **kwargs)
        return self._doors.whole(lambda: self._compute(*args, **kwargs))


class _DataAxis:
    """Gathers the states of a metric over the ranks that see different samples.

    A copy of a metric gathers as the metric does; a pickled one as torchmetrics does by itself.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        return gather_tensors(state, self._group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _DataAxis:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _torchmetrics_own, ()


def _torchmetrics_own() -> Callable[..., list[Tensor]]:
    return gather_all_tensors


def _held(metric: Metric) -> dict[str, Any]:
    """The states of a metric and its caches; lists of states only grow, their tensors do not change."""
    held = {name: vars(metric)[name] for name in _CACHES if name in vars(metric)}
    for name in metric._defaults:
        state = getattr(metric, name)
        held[name] = state.detach().clone() if isinstance(state, Tensor) else list(state)
    return held
