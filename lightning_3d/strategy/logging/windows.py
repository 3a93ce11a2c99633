"""Metrics over a window of calls: a batch that is cut into micro-batches takes the places of a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_3d.graph.calls import shadow


class Windows:
    """Has torchmetrics' ``Running`` count a batch once: later micro-batches add to what the first has put down."""

    def __init__(self) -> None:
        self._index = 0
        # For each metric: the calls it had counted when the batch began, and those of this micro-batch.
        self._begun: dict[int, int] = {}
        self._calls: dict[int, int] = {}

    def follow(self, metric: Metric) -> list[Callable[[], None]]:
        """Follows a metric if it has a window; returns what ends that."""
        if not isinstance(metric, Running):
            return []
        windows, update = self, metric.update

        def counted(*args: Any, **options: Any) -> None:
            with windows._place(metric):
                update(*args, **options)

        # Bound to the metric, so that a copy has its own.
        def forward(self: Running, *args: Any, **options: Any) -> Any:
            with windows._place(self):
                return type(self).forward(self, *args, **options)

        return [shadow(metric, "update", counted), shadow(metric, "forward", MethodType(forward, metric))]

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Context of a micro-batch."""
        self._index = index
        self._calls.clear()
        if index == 0:
            self._begun.clear()
        try:
            yield
        finally:
            self._index = 0

    @contextmanager
    def _place(self, metric: Running) -> Iterator[None]:
        """Context of one call, which goes on with the place that the same call of the first micro-batch has taken."""
        call = self._calls.get(id(metric), 0)
        self._calls[id(metric)] = call + 1
        seen = metric._num_vals_seen
        begun = self._begun.setdefault(id(metric), seen)
        if self._index and begun + call < seen:
            metric._num_vals_seen = begun + call
            place = metric._num_vals_seen % metric.window
            for name in metric.base_metric._defaults:
                setattr(metric.base_metric, name, getattr(metric, f"{name}_{place}"))
            yield
            metric._num_vals_seen = seen
        else:
            yield
