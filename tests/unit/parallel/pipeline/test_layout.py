"""The layout of a large model: which layers lie on which ranks, and who are neighbours."""

from __future__ import annotations

import torch

from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.reference.gpt import GPT
from tests.parity.models import VOCABULARY, NextToken
from tests.unit.parallel.pipeline.planned import plan

LAYERS, STAGES = 96, 4
MESH = MeshSpec(data=16, pipeline=STAGES, tensor=8)


def deep() -> PipelinePlan:
    """As many layers as GPT-3 has, narrow ones."""
    with torch.device("meta"):
        module = NextToken(GPT(VOCABULARY, 16, LAYERS, 2, max_length=12))
    return plan(module, (torch.zeros(2, 12, dtype=torch.int64),), ranks=STAGES)


def test_each_of_four_stages_has_24_of_96_layers() -> None:
    found = deep()
    assert [(stage.first, stage.end, stage.rank) for stage in found.stages] == [
        (24 * rank, 24 * rank + 24, rank) for rank in range(STAGES)
    ]


def test_neighbours_of_512_ranks() -> None:
    assert MESH.world == 512
    for rank in range(MESH.world):
        place = MESH.coordinate(rank)
        row = MESH.group("pipeline_parallel", rank)
        # Tensor ranks lie side by side, so stages are 8 ranks apart, and copies of the model 32.
        assert row == tuple(place.data * 32 + stage * 8 + place.tensor for stage in range(STAGES))
        assert row[place.pipeline] == rank
        assert MESH.group("tensor_parallel", rank) == tuple(range(rank - rank % 8, rank - rank % 8 + 8))
        assert MESH.group("data_parallel", rank) == tuple(range(rank % 32, 512, 32))
