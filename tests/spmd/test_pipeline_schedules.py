"""Torch's schedules with our stages, on plain nets: outputs and gradients are those of one process."""

from __future__ import annotations

import pytest

from lightning_3d.config.schema import SCHEDULES
from tests.spmd.pipeline_nets import Pipeline, batch_of
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


def counts(rank: int, world: int, schedule: str) -> None:
    pipeline = Pipeline(schedule)
    for count in range(1, 10):
        pipeline.train(batch_of(*[3] * count))
    assert pipeline.runs.recorded == [(2, 3, 6)], "one kind of input is recorded once"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches(schedule: str, ranks: int) -> None:
    run_spmd(counts, ranks, schedule)
