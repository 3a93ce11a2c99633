from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import ParameterTable, parameter_table
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_stage_data
from lightning_3d.parallel.data.cost import data_sizes, data_traffic, stage_share
from lightning_3d.parallel.data.engine import PlainEngine
from lightning_3d.parallel.data.plan import DataPlan, ShardUnit, plan_data, stage_units, unit_parameters


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        self.last = nn.Linear(2, 4, bias=False)


def planned(module: nn.Module, zero: int = 1, count: int = 1) -> tuple[ParameterTable, DataPlan]:
    table = parameter_table(module)
    plan = plan_data(table, find_stacks(module), zero_stage=zero, data_size=2, pipeline_size=2, unit_blocks=count)
    return table, plan


@pytest.mark.parametrize(
    ("zero", "data", "casts", "engine"),
    [(0, 2, False, "replicate"), (0, 1, False, "none"), (0, 1, True, "replicate"), (3, 2, False, "fully_shard")],
)
def test_engines_in_a_pipeline(zero: int, data: int, casts: bool, engine: str) -> None:
    table, stacks = parameter_table(Stacked()), find_stacks(Stacked())
    plan = plan_data(table, stacks, zero_stage=zero, data_size=data, pipeline_size=2, needs_units=casts)
    assert plan.engine == engine


def test_units_are_cut_where_stages_are() -> None:
    _, plan = planned(Stacked(), count=3)
    assert [unit.modules for unit in plan.units] == [("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",)]
    lower = stage_units(plan.units, modules={"first", "blocks.0", "blocks.1"})
    upper = stage_units(plan.units, modules={"last", "blocks.2", "blocks.3"})
    assert [unit.modules for unit in lower] == [("blocks.0", "blocks.1")]
    assert [unit.modules for unit in upper] == [("blocks.2",), ("blocks.3",)]


def test_units_inside_modules_of_the_stage_keep_their_precision() -> None:
    units = (ShardUnit(modules=("blocks.1.norm", "stem.norm"), keeps_precision=True), ShardUnit(modules=("blocks.1",)))
    assert stage_units(units, modules={"blocks.1"}) == (
        ShardUnit(modules=("blocks.1.norm",), keeps_precision=True),
        ShardUnit(modules=("blocks.1",)),
    )


def test_what_two_stages_of_a_rank_hold_belongs_to_the_root() -> None:
    units = tuple(ShardUnit(modules=(f"blocks.{block}",)) for block in (0, 1))
    kept = stage_units(units, modules={"blocks.0", "blocks.1"}, apart={"blocks.0.weight", "last.weight"})
    assert [unit.modules for unit in kept] == [("blocks.1",)]


def test_a_tied_block_is_a_unit_in_each_of_its_stages() -> None:
    module = Stacked()
    module.blocks[3].weight = module.blocks[0].weight
    table, plan = planned(module)
    assert plan.units[0].modules == ("blocks.0", "blocks.3")
    units = stage_units(plan.units, modules={"blocks.2", "blocks.3", "last"})
    assert [unit.modules for unit in units] == [("blocks.3",), ("blocks.2",)]
    tied, own, root = unit_parameters(table, units)
    assert [row.names for row in tied] == [("blocks.0.weight", "blocks.3.weight")]
    assert [row.name for row in own] == ["blocks.2.weight"]
    assert "blocks.0.weight" not in {row.name for row in root}


def test_a_stage_pays_for_what_it_manages() -> None:
    table, plan = planned(Stacked(), zero=3)
    managed = {"first.weight", "blocks.0.weight", "blocks.1.weight"}
    share, own = stage_share(table, plan, managed=managed, modules={"first", "blocks.0", "blocks.1"})
    sizes = data_sizes(share, own, MeshSpec(data=2, pipeline=2, tensor=1))
    rows = {row.operation: (row.calls, row.payload) for row in data_traffic(own, sizes, microbatches=4).rows}
    block, ends = 4 * 4, 8 * 4
    assert rows == {
        "all_gather": (2 * 2 * 4 + 1, 2 * 2 * 4 * block + ends),
        "reduce_scatter": (3 * 4, 4 * (2 * block + ends)),
    }


def test_nothing_is_sharded_on_one_data_rank() -> None:
    module = Stacked()
    engine = apply_stage_data({0: module}, module, DataPlan(engine="none", zero_stage=1), None)
    assert isinstance(engine, PlainEngine)
    assert all(type(parameter.data) is torch.Tensor for parameter in module.parameters())
