from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.data.plan import DataPlan, ShardUnit, plan_data, shard_units, unit_parameters
from lightning_3d.parallel.data.scalars import scalar_parameters
from lightning_3d.parallel.data.zero import ZeroStage
from tests.parity.catalog import build


class Stacked(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))
        self.last = nn.Linear(2, 2)


def units(module: nn.Module, count: int = 1) -> list[tuple[str, ...]]:
    found = shard_units(parameter_table(module), find_stacks(module), unit_blocks=count)
    return [unit.modules for unit in found]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [("0",), ("1",), ("2",), ("3",), ("4",)]), (2, [("0", "1"), ("2", "3"), ("4",)]), (9, [tuple("01234")])],
)
def test_units_are_neighbouring_blocks(count: int, expected: list[tuple[str, ...]]) -> None:
    found = units(Stacked(), count)
    assert found == [tuple(f"blocks.{block}" for block in group) for group in expected]


def test_blocks_that_share_a_parameter_are_one_unit() -> None:
    module = Stacked()
    module.blocks[3].weight = module.blocks[1].weight
    assert units(module) == [("blocks.0",), ("blocks.1", "blocks.3"), ("blocks.2",), ("blocks.4",)]


def test_chains_of_shared_parameters_are_one_unit() -> None:
    module = Stacked()
    module.blocks[2].weight = module.blocks[0].weight
    module.blocks[4].bias = module.blocks[2].bias
    assert units(module) == [("blocks.0", "blocks.2", "blocks.4"), ("blocks.1",), ("blocks.3",)]


def test_a_block_that_shares_with_the_outside_belongs_to_the_root() -> None:
    module = Stacked()
    module.blocks[1].weight = module.last.weight
    module.blocks[2].bias = module.blocks[1].bias
    assert units(module) == [("blocks.0",), ("blocks.3",), ("blocks.4",)]
    found = shard_units(parameter_table(module), find_stacks(module), unit_blocks=1)
    *_, root = unit_parameters(parameter_table(module), found)
    assert {row.name for row in root} >= {"first.weight", "last.bias", "blocks.1.bias", "blocks.2.weight"}


def test_tied_embeddings_stay_in_the_root() -> None:
    module = build("HF GPT-2 (tied)")
    assert units(module) == [(f"model.transformer.h.{block}",) for block in range(3)]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"zero_stage": 0, "data_size": 1}, "none"),
        ({"zero_stage": 0, "data_size": 2}, "ddp"),
        ({"zero_stage": 0, "data_size": 2, "needs_units": True}, "replicate"),
        ({"zero_stage": 0, "data_size": 2, "tensor_size": 2}, "replicate"),
        ({"zero_stage": 0, "data_size": 1, "tensor_size": 2}, "none"),
        ({"zero_stage": 1, "data_size": 1}, "none"),
        ({"zero_stage": 1, "data_size": 1, "tensor_size": 2}, "none"),
        ({"zero_stage": 1, "data_size": 2}, "fully_shard"),
        ({"zero_stage": 3, "data_size": 1, "cpu_offload": True}, "fully_shard"),
        ({"zero_stage": 2, "data_size": 1, "needs_units": True}, "fully_shard"),
    ],
)
def test_engines(options: dict[str, Any], engine: str) -> None:
    plan = plan_data(parameter_table(Stacked()), find_stacks(Stacked()), **options)
    assert plan.engine == engine
    assert len(plan.units) == (5 if engine in ("replicate", "fully_shard") else 0)


def test_plans_say_what_they_are() -> None:
    assert str(DataPlan(engine="none", zero_stage=1)) == "one rank, nothing to shard"
    assert str(DataPlan(engine="ddp", zero_stage=0)) == "zero_stage 0 by ddp"
    assert str(DataPlan(engine="replicate", zero_stage=0, units=(ShardUnit(modules=("0",)),))).endswith(
        "by replicate, 1 unit and the root"
    )
    sharded = plan_data(parameter_table(Stacked()), find_stacks(Stacked()), zero_stage=2, data_size=2, unit_blocks=2)
    assert str(sharded) == "zero_stage 2 by fully_shard, 3 units and the root"
    assert str(sharded.units[0]) == "blocks.0 + blocks.1"


def test_stages_gather_and_reduce_as_they_should() -> None:
    for stage, reduces, keeps in ((1, False, True), (2, True, True), (3, True, False)):
        zero = ZeroStage(stage=stage)
        assert zero.reshard_blocks_after_forward is (stage == 3)
        inside, last = zero.blocks(last=False), zero.blocks(last=True)
        assert (inside.reduce_scatter, inside.all_reduce, inside.reshard) == (reduces, False, not keeps)
        assert (last.reduce_scatter, last.all_reduce, last.reshard) == (True, True, True)
        assert not zero.root(last=False).reshard


def test_scalars_are_found_once() -> None:
    import torch

    module = nn.Module()
    module.one = module.two = nn.Parameter(torch.tensor(1.0))
    module.many = nn.Parameter(torch.ones(1))
    assert scalar_parameters(module) == [module.one]
