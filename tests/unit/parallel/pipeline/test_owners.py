from __future__ import annotations

import torch
from torch import nn

from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.pipeline.owners import find_owners, parameters_below
from lightning_3d.parallel.pipeline.record.step import StepRecord


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.average = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(1))


def _record(**parameters: frozenset[int]) -> StepRecord:
    blocks = tuple(f"blocks.{index}" for index in range(4))
    used = {
        f"{block}.{kind}": frozenset({index + 1}) for index, block in enumerate(blocks) for kind in ("weight", "bias")
    }
    modules = {block: frozenset({index + 1}) for index, block in enumerate(blocks)}
    return StepRecord(blocks=blocks, calls=(), boundaries=((),) * 4, parameters={**used, **parameters}, modules=modules)


def test_owners_and_copies() -> None:
    module = Parts()
    table = parameter_table(module)
    below = parameters_below(module, (*(f"blocks.{index}" for index in range(4)), "average", "tied"), table)
    assert below["tied"] == ("blocks.0.weight", "tied.bias")
    holders, modules = find_owners(
        _record(scale=frozenset({0, 4})),
        (0, 1, 3),
        parameters=table,
        below=below,
        twins={"average.weight": "blocks.2.weight", "average.bias": "blocks.3.bias"},
    )
    assert [holders[f"blocks.{index}.weight"] for index in range(4)] == [(0,), (1,), (1,), (2,)]
    assert holders["scale"] == (0, 2)
    # A copy lies with its original, and all of it on one stage that can call it.
    assert modules["average"] == (1,)
    assert holders["average.weight"] == (1,)
    assert holders["average.bias"] == (1, 2)
    # What was never used lies with what it is called with.
    assert modules["tied"] == holders["tied.bias"] == (0,)
    assert list(holders) == [row.name for row in table.rows]
