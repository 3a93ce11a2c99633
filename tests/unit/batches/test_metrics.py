"""What parts of a batch have told a metric, as one: the value of the whole batch, and nothing of it stays."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

from lightning_3d.batches.metrics import (
    MetricState,
    batch_of,
    computed,
    forget_batch,
    is_in_forward,
    joined,
    note_batch,
    set_batch,
)
from lightning_3d.graph.calls import shadow


def noted(metric: Metric) -> Metric:
    """A metric that keeps what each of its batches has told it."""
    plain = metric.compute

    def compute() -> Any:
        if is_in_forward(metric):
            note_batch(metric)
        return plain()

    shadow(metric, "compute", compute)
    return metric


def told(metric: Metric, values: Tensor) -> Any:
    return (
        metric(values.sigmoid(), torch.arange(len(values)) % 2)
        if isinstance(metric, (BinaryAUROC, BinaryF1Score))
        else metric(values)
    )


@pytest.mark.parametrize(
    "kind",
    [SumMetric, MeanMetric, MaxMetric, MinMetric, CatMetric, BinaryAUROC, BinaryF1Score],
    ids=lambda kind: kind.__name__,
)
def test_parts_of_a_batch_are_the_batch(kind: type[Metric]) -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(0))
    expected = told(kind(), values[6:])
    metric = noted(kind())
    told(metric, values[:6])
    parts = []
    for part in (values[6:10], values[10:]):
        told(metric, part)
        state = batch_of(metric)
        assert state is not None
        parts.append(pickle.loads(pickle.dumps(state)))
    whole = joined(metric, parts)
    before = metric.compute()
    torch.testing.assert_close(computed(metric, whole, synced=False), expected)
    metric._computed = None
    assert torch.equal(metric.compute(), before)
    assert metric._update_count == 3


class Masks(Metric):
    """Keeps a tuple of each sample, as torchmetrics does of segmentations: no tensor itself, and one deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any]
        self.add_state("kept", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.kept += [((2, 3), bytes([int(value)]), {"value": value}) for value in values]

    def compute(self) -> Tensor:
        return torch.stack([shape[0] * kept["value"] + counts[0] for shape, counts, kept in self.kept])


def test_states_may_be_anything() -> None:
    metric = noted(Masks())
    values = torch.arange(3.0, requires_grad=True)
    assert torch.equal(metric(values), 3 * values)
    state = batch_of(metric)
    assert state is not None
    assert not state.states["kept"][0][2]["value"].requires_grad
    again = pickle.loads(pickle.dumps(state))
    assert torch.equal(computed(metric, joined(metric, [state, again]), synced=False), 3 * values.repeat(2))
    assert len(metric.kept) == 3


def test_a_metric_without_states_has_nothing_to_keep() -> None:
    both: Any = noted(SumMetric() + MeanMetric())
    both(torch.ones(2))
    assert batch_of(both) is None
    one = noted(SumMetric())
    one(torch.ones(2))
    forget_batch(one)
    assert batch_of(one) is None
    set_batch(one, MetricState.empty(one))
    assert float(computed(one, MetricState.empty(one), synced=False)) == 0.0
