"""ZeRO 0 to 3 inside torch's pipeline schedules: gradients of one process, and collectives to the byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.counters import CollectiveCounter
from lightning_3d.errors import ModuleError
from lightning_3d.gradients import PipelineShare, clip_by_norm
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import ParameterTable, parameter_table
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import apply_stage_data
from lightning_3d.parallel.data.cost import data_sizes, data_traffic, stage_share
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.plan import DataPlan, plan_data
from lightning_3d.parallel.pipeline.shared import SharedGradients
from tests.marks import more
from tests.spmd.hand_cut import MICROBATCH, SCALE, TIED, HandCut, Model, batch
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

CPU = torch.device("cpu")
MICROBATCHES = 4
MAX_NORM = 0.01
DATA = ("data_parallel", "data_shard", "data_replicate")


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str
    zero: int
    accumulate: int = 1
    data: int = 2
    replicas: int = 1
    microbatches: int = MICROBATCHES
    offload: bool = False
    dtype: torch.dtype = torch.float64
    policy: MixedPrecisionPolicy | None = None


@dataclass(kw_only=True)
class Found:
    """What one rank has after a step."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    norm: float = math.nan
    counted: set[tuple[Any, ...]] = field(default_factory=set)
    expected: set[tuple[Any, ...]] = field(default_factory=set)
    at_rest: bool = False


class OnRank:
    """The stages of one rank on all axes, and what runs them."""

    def __init__(self, case: Case, world: int) -> None:
        spec = MeshSpec(data=case.data, pipeline=world // case.data, tensor=1, data_replicate=case.replicas)
        self.case, self.spec = case, spec
        self.mesh: DeviceMesh = build_device_mesh(spec, "cpu")
        self.model = Model(case.dtype)
        self.table: ParameterTable = parameter_table(self.model)
        self.plan: DataPlan = plan_data(
            self.table,
            find_stacks(self.model),
            zero_stage=case.zero,
            data_size=spec.data,
            pipeline_size=spec.pipeline,
            cpu_offload=case.offload,
            needs_units=case.policy is not None,
        )
        self.cut = HandCut(case.schedule, self.model, self.mesh.get_group("pipeline_parallel"))
        axis = data_mesh(self.mesh) if case.zero else data_axis_mesh(self.mesh)
        self.engine: DataEngine = apply_stage_data(self.cut.stages, self.model, self.plan, axis, policy=case.policy)
        parameters = dict(self.model.named_parameters())
        holders = {TIED: self.cut.tied} if len(self.cut.tied) > 1 else {}
        self.shared = SharedGradients(parameters, holders, self.mesh, device=CPU)
        own = {parameter for stage in self.cut.stages.values() for parameter in stage.parameters()}
        self.own: Mapping[str, nn.Parameter] = {name: p for name, p in parameters.items() if p in own}

    def step(self, seed: int) -> None:
        """Runs what lies between two optimizer steps."""
        place = self.mesh.get_local_rank("data_parallel") if self.spec.data_replicate == 1 else self._place()
        for index in range(self.case.accumulate):
            whole = batch(seed + index, self.case.microbatches * self.spec.data)
            mine = tuple(tensor.chunk(self.spec.data)[place] for tensor in whole)
            self.engine.before_microbatch(last=index == self.case.accumulate - 1, backwards=self.case.microbatches)
            self.engine.run(lambda given: self.cut.step(given, lazy=self.case.zero == 3), mine)
        self.engine.gradients_complete()
        self.shared.sum()

    def expected(self) -> set[tuple[Any, ...]]:
        """What the formulas say of the data axis, and of the scalar beside the units."""
        total = Traffic()
        count = self.case.microbatches * self.case.accumulate
        managed: set[str] = set()
        # A V schedule has both ends on one rank.
        apart = {TIED, "head.weight"} if {0, self.cut.count - 1} <= set(self.cut.stages) else set()
        for index, stage in self.cut.stages.items():
            held = {name for name, p in self.own.items() if p in set(stage.parameters()) and name != SCALE}
            table, plan = stage_share(
                self.table, self.plan, managed=held - managed, modules=self.cut.modules_of(index), apart=apart
            )
            managed |= held
            sizes = data_sizes(table, plan, self.spec, policy=self.case.policy)
            total += data_traffic(plan, sizes, microbatches=count)
        if SCALE in self.own:
            axes = DATA[1:] if self.case.zero and self.spec.data_replicate > 1 else DATA[:1]
            for axis in axes:
                size = self.mesh[axis].size()
                row = TrafficRow(operation="all_reduce", axis=axis, group_size=size, calls=1, payload=16)
                total += Traffic(rows=(row,))
        return comparable(total)

    def _place(self) -> int:
        replica, shard = (self.mesh.get_local_rank(axis) for axis in DATA[:0:-1])
        return replica * self.mesh["data_shard"].size() + shard


def comparable(table: Any) -> set[tuple[Any, ...]]:
    return {
        (row.operation, row.axis, row.group_size, row.calls, row.payload) for row in table.rows if row.group_size > 1
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}


def observe(rank: int, world: int, *cases: Case) -> list[Found]:
    """Runs two steps of each case; the second one is looked at."""
    return [_observe(OnRank(case, world)) for case in cases]


def _observe(run: OnRank) -> Found:
    run.step(0)
    run.model.zero_grad()
    with CollectiveCounter(run.mesh) as counter:
        run.step(100)
    found = Found(gradients=gradients(run.own))
    found.counted = {row for row in comparable(counter.table) if row[1] in DATA}
    found.expected = run.expected()
    share = PipelineShare(ranks=run.spec.pipeline, holders=run.shared.holders, device=CPU)
    world = torch.distributed.group.WORLD
    found.norm = float(clip_by_norm(list(run.own.values()), MAX_NORM, group=world, share=share))
    found.clipped = gradients(run.own)
    run.engine.rest()
    found.at_rest = run.case.zero == 0 or all(isinstance(p, DTensor) for n, p in run.own.items() if n != SCALE)
    return found


def of_one_process(case: Case) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Gradients, their norm, and the clipped gradients of the same batches without a mesh."""
    model = Model(case.dtype)
    count = case.microbatches * case.data
    for index in range(case.accumulate):
        for ids, targets in zip(*batch(100 + index, count), strict=True):
            (model.loss(ids, targets) / count).backward()
    named = dict(model.named_parameters())
    plain = gradients(named)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    return plain, norm, gradients(named)


def assert_same(world: int, *cases: Case, tolerance: float = 1e-12) -> None:
    ranks = run_spmd(observe, world, *cases, timeout=110)
    for index, case in enumerate(cases):
        plain, norm, clipped = of_one_process(case)
        seen: set[str] = set()
        for found in (rank[index] for rank in ranks):
            assert found.counted == found.expected, case
            assert found.at_rest, case
            assert found.norm == pytest.approx(norm, rel=tolerance), case
            for name, gradient in found.gradients.items():
                torch.testing.assert_close(gradient, plain[name], rtol=0, atol=tolerance, msg=f"{case}: {name}")
                torch.testing.assert_close(found.clipped[name], clipped[name], rtol=0, atol=tolerance)
            seen |= set(found.gradients)
        assert seen == set(plain), case


@pytest.mark.parametrize("schedule", [more("gpipe"), "1f1b", more("interleaved1f1b"), more("zbvzerobubble")])
def test_every_stage_of_zero_in_schedules(schedule: str) -> None:
    cases = [Case(schedule=schedule, zero=zero, accumulate=times) for zero in range(4) for times in (1, 2)]
    assert_same(4, *cases)


@pytest.mark.parametrize("schedule", ["1f1b", more("zbvzerobubble")])
def test_hybrid_sharding_meets_its_replicas_once(schedule: str) -> None:
    cases = [Case(schedule=schedule, zero=zero, accumulate=2, data=4, replicas=2) for zero in (1, 2, 3)]
    assert_same(8, *cases)


def miscounted(rank: int, world: int) -> str:
    """The last backward that is told of never comes, as where a block has no gradient in the last micro-batch."""
    run = OnRank(Case(schedule="1f1b", zero=2, data=4, replicas=2), world)
    run.engine.before_microbatch(last=True, backwards=MICROBATCHES + 1)
    run.engine.run(run.cut.step, batch(0, MICROBATCHES))
    with pytest.raises(ModuleError, match="none in the last one") as caught:
        run.engine.gradients_complete()
    return str(caught.value)


def test_gradients_that_replicas_would_lose_are_found() -> None:
    assert all("a Block got" in text or "a StageModule got" in text for text in run_spmd(miscounted, 8))


def test_one_data_rank_whose_parameters_are_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    cases = [Case(schedule="zbvzerobubble", zero=zero, data=1, policy=policy) for zero in (0, 1, 3)]
    assert_same(2, *cases)


def visit(rank: int, world: int, zero: int) -> tuple[Tensor, list[bool], bool]:
    """Uses modules of a rank's stages outside of schedules, between two halves of an accumulation."""
    run = OnRank(Case(schedule="zbvzerobubble", zero=zero, accumulate=2), world)
    run.step(0)
    run.model.zero_grad()
    run.engine.before_microbatch(last=False, backwards=MICROBATCHES)
    first, second = (tuple(tensor.chunk(2)[rank // 2] for tensor in batch(seed, 8)) for seed in (100, 101))
    run.engine.run(run.cut.step, first)
    blocks = [run.model.blocks[2], run.model.blocks[1]] if rank % 2 else [run.model.blocks[3], run.model.blocks[0]]
    hidden = torch.ones(MICROBATCH, 8, dtype=torch.float64)

    def use() -> Tensor:
        result: Tensor = run.engine.visit(lambda: blocks[0](blocks[1](hidden)))
        return result if rank % 2 else result @ run.model.head.weight.T

    with torch.no_grad():
        used: Tensor = run.engine.visit(use)
    rested = [isinstance(parameter, DTensor) for name, parameter in run.own.items() if name != SCALE]
    run.engine.before_microbatch(last=True, backwards=MICROBATCHES)
    run.engine.run(run.cut.step, second)
    run.engine.gradients_complete()
    run.shared.sum()
    plain, _, _ = of_one_process(run.case)
    exact = all(torch.allclose(value, plain[name], atol=1e-12) for name, value in gradients(run.own).items())
    return used, rested, exact


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_modules_of_stages_outside_schedules(zero: int) -> None:
    model, hidden = Model(), torch.ones(MICROBATCH, 8, dtype=torch.float64)
    with torch.no_grad():
        inner = model.blocks[2](model.blocks[1](hidden))
        outer = model.blocks[3](model.blocks[0](hidden)) @ model.head.weight.T
    for rank, (used, rested, exact) in enumerate(run_spmd(visit, 4, zero)):
        torch.testing.assert_close(used, inner if rank % 2 else outer, rtol=0, atol=1e-12)
        assert all(rested)
        assert exact


def cast(rank: int, world: int) -> list[torch.dtype]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = OnRank(Case(schedule="1f1b", zero=1, policy=policy), world)
    images, labels = torch.ones(2), torch.ones(2, dtype=torch.int64)
    given: list[torch.dtype] = []
    run.engine.run(
        lambda pair, more: given.extend([*(each.dtype for each in pair), more["x"].dtype]),
        (images, labels),
        {"x": images},
    )
    return given


def test_inputs_of_steps_are_cast_as_parameters_are() -> None:
    assert run_spmd(cast, 4) == [[torch.bfloat16, torch.int64, torch.bfloat16]] * 4


def test_shards_in_host_memory() -> None:
    assert_same(4, Case(schedule="zbvzerobubble", zero=3, accumulate=2, offload=True))
