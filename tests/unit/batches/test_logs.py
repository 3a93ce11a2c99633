from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_3d.batches.logs import LogCall, LogCollector, log_options, reduction_name


class Listens(L.LightningModule):
    """Keeps what reaches Lightning's own ``log``."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged[name] = (value, options)


def test_values_are_combined_as_they_are_reduced() -> None:
    module, collector = Listens(), LogCollector()
    for size, value in ((2, 4.0), (1, 10.0)):
        collector.add(LogCall.of(module, "mean", torch.tensor(value), True, on_epoch=True), size)
        collector.add(LogCall.of(module, "own", value, batch_size=3), size)
        for name in ("sum", "min", "max"):
            collector.add(LogCall.of(module, name, value, reduce_fx=getattr(torch, name)), size)
    for call in collector.combined():
        call.make(module)
    assert {name: float(value) for name, (value, _) in module.logged.items()} == {
        "mean": 6.0,
        "own": 7.0,
        "sum": 14.0,
        "min": 4.0,
        "max": 10.0,
    }
    assert module.logged["mean"][1] == {"prog_bar": True, "on_epoch": True, "batch_size": 3}
    assert module.logged["own"][1]["batch_size"] == 6
    assert collector.combined() == []


def test_values_that_stand_for_no_sample_are_values() -> None:
    module, collector = Listens(), LogCollector()
    for value in (1.0, 2.0):
        collector.add(LogCall.of(module, "none", value, batch_size=0), 2)
    (call,) = collector.combined()
    assert float(call.value) == 1.5
    assert call.options["batch_size"] == 0


def test_a_metric_is_logged_itself_with_the_mean_of_its_calls() -> None:
    module, metric, collector = Listens(), MeanMetric(), LogCollector()
    for size, value in ((3, 1.0), (1, 5.0)):
        metric(torch.full((size,), value))
        collector.add(LogCall.of(module, "metric", metric, on_step=True), size)
    for call in collector.combined():
        call.make(module)
    assert module.logged["metric"][0] is metric
    assert float(metric._forward_cache) == float(metric.compute()) == 2.0


def test_arguments_by_position() -> None:
    assert log_options((True, None, False), {"sync_dist": True}) == {
        "prog_bar": True,
        "logger": None,
        "on_step": False,
        "sync_dist": True,
    }
    assert log_options((False,) * 4 + ("sum", False, True), {})["sync_dist"] is True
    assert reduction_name("sum") == reduction_name(torch.sum) == "sum"


def test_values_with_dims_are_refused() -> None:
    collector = LogCollector()
    collector.add(LogCall.of(Listens(), "many", torch.zeros(2)), 2)
    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        collector.combined()


def test_a_value_is_logged_as_it_was() -> None:
    module, value = Listens(), torch.tensor(1.0)
    call = LogCall.of(module, "value", value)
    value.add_(1.0)
    call.make(module)
    assert float(module.logged["value"][0]) == 1.0
