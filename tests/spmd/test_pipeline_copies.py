"""Averages of the weights by hand in a pipeline: each rank has those of its own stages, and follows them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.marks import more
from tests.spmd.tensor_runs import Scenario, seen_alike
from tests.spmd.test_resting import gpt2_data, packed_in_place, packed_lerp, written

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

MESHES: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    "pipeline x tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "pipeline x data": {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "zero_stage": 1},
}
WORLDS = {"pipeline": 2, "pipeline x tensor": 4, "pipeline x data": 4}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scenario", [packed_lerp, more(gpt2_data)], ids=lambda each: each.__name__)
def test_averages_follow_the_weights(scenario: Scenario, mesh: str) -> None:
    seen_alike(scenario, WORLDS[mesh], timeout=90, **MESHES[mesh])


@pytest.mark.parametrize("scenario", [packed_in_place, written], ids=lambda each: each.__name__)
def test_writing_in_hooks(scenario: Scenario) -> None:
    seen_alike(scenario, 2, **MESHES["pipeline"])
