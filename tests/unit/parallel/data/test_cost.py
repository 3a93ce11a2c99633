import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.cost import Footprint, Traffic
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.cost import DataSizes, data_footprint, data_sizes, data_traffic
from lightning_3d.parallel.data.plan import DataPlan, plan_data

BLOCKS, WIDTH = 4, 8
BLOCK = (WIDTH * WIDTH + WIDTH) * 4
ROOT = 3 * WIDTH * 4
WHOLE = BLOCKS * BLOCK + ROOT
MASTER = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.blocks[0].requires_grad_(not frozen)


def priced(
    zero: int, data: int = 4, *, replicas: int = 1, policy: MixedPrecisionPolicy | None = None, frozen: bool = False
) -> tuple[DataPlan, DataSizes]:
    model = Model(frozen)
    table = parameter_table(model)
    plan = plan_data(table, find_stacks(model), zero_stage=zero, data_size=data, needs_units=policy is not None)
    mesh = MeshSpec(data=data, pipeline=1, tensor=1, data_replicate=replicas)
    return plan, data_sizes(table, plan, mesh, policy=policy)


def calls(traffic: Traffic) -> dict[str, tuple[int, int]]:
    return {row.operation: (row.calls, row.payload) for row in traffic.rows}


def test_sizes_of_units_are_padded_to_the_shards() -> None:
    _, sizes = priced(3)
    assert [unit.stored for unit in sizes.blocks] == [BLOCK] * BLOCKS
    # Three rows on four ranks are padded to four.
    assert sizes.root.stored == sizes.root.reduced == ROOT * 4 // 3
    assert (sizes.replicas, sizes.shards) == (1, 4)


def test_sizes_follow_the_policy_and_frozen_parameters() -> None:
    _, sizes = priced(1, 2, policy=MASTER, frozen=True)
    first, second = sizes.blocks[:2]
    assert (first.stored, first.gathered, first.trained, first.reduced) == (BLOCK, BLOCK // 2, 0, 0)
    assert (second.stored, second.gathered, second.trained, second.reduced) == (BLOCK, BLOCK // 2, BLOCK, BLOCK)


@pytest.mark.parametrize(
    ("zero", "gathers", "scatters"), [(1, BLOCKS + 1, BLOCKS + 1), (2, BLOCKS + 1, 20), (3, 8 * BLOCKS + 1, 20)]
)
def test_collectives_of_four_microbatches(zero: int, gathers: int, scatters: int) -> None:
    plan, sizes = priced(zero, 4)
    found = calls(data_traffic(plan, sizes, microbatches=4))
    whole, root = sizes.whole.stored, sizes.root.stored
    assert found["all_gather"] == (gathers, whole if zero < 3 else 8 * (whole - root) + root)
    assert found["reduce_scatter"] == (scatters, whole if zero == 1 else 4 * whole)
    assert "all_reduce" not in found


def test_replicas_reduce_their_shards_once() -> None:
    plan, sizes = priced(2, 4, replicas=2)
    rows = {row.operation: row for row in data_traffic(plan, sizes, microbatches=4).rows}
    assert {name: row.axis for name, row in rows.items()} == {
        "all_gather": "data_shard",
        "reduce_scatter": "data_shard",
        "all_reduce": "data_replicate",
    }
    assert (rows["all_reduce"].calls, rows["all_reduce"].payload) == (BLOCKS + 1, sizes.whole.stored // 2)


def test_a_frozen_unit_is_gathered_and_never_reduced() -> None:
    plan, sizes = priced(1, frozen=True)
    found = calls(data_traffic(plan, sizes, microbatches=1))
    assert found["all_gather"][0] == BLOCKS + 1
    assert found["reduce_scatter"] == (BLOCKS, sizes.whole.stored - BLOCK)


def test_whole_copies_reduce_once_whatever_the_microbatches() -> None:
    plan, sizes = priced(0)
    assert plan.engine == "ddp"
    bucket, used = WHOLE + 4, 4 * (2 * BLOCKS + 1 + 1)
    for microbatches in (1, 4):
        assert calls(data_traffic(plan, sizes, microbatches=microbatches)) == {"all_reduce": (2, bucket + used)}
    plan, sizes = priced(0, policy=MASTER)
    assert plan.engine == "replicate"
    assert calls(data_traffic(plan, sizes, microbatches=4)) == {"all_reduce": (BLOCKS + 1, WHOLE)}


@pytest.mark.parametrize("policy", [None, MASTER])
@pytest.mark.parametrize("zero", range(4))
def test_one_rank_sends_nothing(zero: int, policy: MixedPrecisionPolicy | None) -> None:
    plan, sizes = priced(zero, 1, policy=policy)
    assert data_traffic(plan, sizes, microbatches=4) == Traffic()


def test_buckets_are_those_of_torch() -> None:
    """torch's own function, with the limits that DistributedDataParallel gives it."""
    parameters = [nn.Parameter(torch.zeros(size, 1024)) for size in (100, 200, 3000, 1, 5000, 3000, 7)]
    parameters.insert(3, nn.Parameter(torch.zeros(40, 1024, dtype=torch.float64)))
    model = nn.Module()
    model.rows = nn.ParameterList(parameters)
    table = parameter_table(model)
    plan = plan_data(table, (), zero_stage=0, data_size=2)
    sizes = data_sizes(table, plan, MeshSpec(data=2, pipeline=1, tensor=1))
    tensors = [torch.zeros(1), *parameters]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20])
    assert len(indices) > 3
    assert sorted(sizes.buckets) == sorted(sum(tensors[index].nbytes for index in bucket) for bucket in indices)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_whole_lives_between_steps(zero: int) -> None:
    plan, sizes = priced(zero)
    shard = sizes.whole.stored // 4
    at_rest = Footprint(parameters=shard, gradients=shard, optimizer=2 * shard)
    assert data_footprint(plan, sizes, "between_steps") == data_footprint(plan, sizes, "after_backward") == at_rest


@pytest.mark.parametrize(
    ("zero", "policy", "per_parameter"),
    [
        (0, None, 16),
        (1, None, 8 + 12 / 4),
        (2, None, 4 + 16 / 4),
        (0, MASTER, 2 + 16),
        (1, MASTER, 6 + 12 / 4),
        (2, MASTER, 2 + 16 / 4),
        (3, MASTER, 16 / 4),
    ],
)
def test_bytes_per_parameter_before_a_later_backward(
    zero: int, policy: MixedPrecisionPolicy | None, per_parameter: float
) -> None:
    plan, sizes = priced(zero, policy=policy)
    root = sizes.root.gathered if zero == 3 else 0
    total = data_footprint(plan, sizes, "before_backward").total
    assert math.isclose((total - root) * 4 / sizes.whole.stored, per_parameter)


def test_an_optimizer_may_keep_less_than_adam() -> None:
    plan, sizes = priced(1)
    assert data_footprint(plan, sizes, "between_steps", optimizer_states=0).optimizer == 0
