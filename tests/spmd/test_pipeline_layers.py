"""The smallest pipeline: two linear layers in a row, one on each of two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import Batch, Learner
from tests.spmd.fits import loader, normal
from tests.spmd.tensor_runs import Ranks, seen_alike

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

SAMPLES, MICROBATCHES = 64, 8


class TwoLayers(Learner):
    """A row of two layers and nothing else, on which a regression is learnt."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)))

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.model(inputs), targets)


def trained(ranks: Ranks) -> Any:
    batches = [(normal(seed, SAMPLES, 16), normal(seed + 9, SAMPLES, 4)) for seed in range(3)]
    microbatches = {"num_microbatches": MICROBATCHES}
    return ranks.fit(TwoLayers(), loader(batches), strategy=microbatches, gradient_clip_val=0.5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_layers_on_two_ranks_in_eight_microbatches(schedule: str) -> None:
    record = seen_alike(trained, tensor_parallel_size=1, pipeline_parallel_size=2, pipeline_schedule=schedule)
    assert len(record.losses) == len(record.gradients) == 3
