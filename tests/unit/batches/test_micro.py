from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import BatchError


class Graphs(L.LightningModule):
    """Knows how to cut what nobody else can."""

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        return [(batch, index) for index in range(count)]


@pytest.mark.parametrize(
    ("options", "samples", "sizes"),
    [
        ({}, 7, (1,)),
        ({"num_microbatches": 4}, 7, (2, 2, 2, 1)),
        ({"micro_batch_size": 3}, 7, (3, 2, 2)),
        ({"pipeline_parallel_size": 2}, 16, (2,) * 8),
        ({"pipeline_parallel_size": 2}, 5, (1,) * 5),
        ({"pipeline_parallel_size": 2, "micro_batch_size": 8}, 16, (8, 8)),
        ({"pipeline_parallel_size": 2, "num_microbatches": 1}, 16, (1,)),
    ],
)
def test_sizes(options: dict[str, Any], samples: int, sizes: tuple[int, ...]) -> None:
    batches = MicroBatches(L.LightningModule(), StrategyConfig(**options))
    assert batches.sizes(torch.zeros(samples, 2)) == sizes


def test_parts() -> None:
    batch = torch.arange(7)
    batches = MicroBatches(L.LightningModule(), StrategyConfig(num_microbatches=2))
    assert [part.tolist() for part in batches.split(batch, (4, 3))] == [[0, 1, 2, 3], [4, 5, 6]]
    assert batches.first(batch).tolist() == [0, 1, 2, 3]
    whole = MicroBatches(L.LightningModule(), StrategyConfig())
    assert whole.first(batch) is batch


def test_a_batch_that_only_the_module_can_cut() -> None:
    batches = MicroBatches(Graphs(), StrategyConfig(pipeline_parallel_size=2))
    assert batches.sizes(object()) == (1,) * 8
    assert batches.first("graph") == ("graph", 0)


def test_batches_without_a_size() -> None:
    with pytest.raises(BatchError, match="no batch size can be found in a batch of type object"):
        MicroBatches(L.LightningModule(), StrategyConfig(num_microbatches=2)).sizes(object())
    batches = MicroBatches(L.LightningModule(), StrategyConfig(num_microbatches=2, micro_batch_size=2))
    with pytest.raises(BatchError, match="7 samples makes 4 micro-batches of micro_batch_size=2"):
        batches.sizes(torch.zeros(7))
