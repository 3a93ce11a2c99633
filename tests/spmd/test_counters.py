from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.counters import CollectiveCounter, LiveBytes, Owners, measure_peak
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

LAYERS = 3
WIDTH = 32
# Bytes of all parameters; every layer's size divides by the worlds used here, so nothing is padded.
PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH * 4
# Large enough that the loss makes the peak, where no collective is in flight.
ROWS = 128
NAMES = ("data_replicate", "data_shard")


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def shard(shape: tuple[int, ...], reshard: bool) -> tuple[nn.Sequential, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
    model = chain()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model, mesh


def micro_batches(model: nn.Module, count: int, last: Callable[[bool], None]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.ones(ROWS, WIDTH)

    def step() -> None:
        for index in range(count):
            last(index == count - 1)
            model(batch).cos().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def sharded_counts(rank: int, world: int, shape: tuple[int, ...], reshard: bool, gather_once: bool) -> dict[str, Any]:
    model, mesh = shard(shape, reshard)
    assert isinstance(model, FSDPModule)

    def last(is_last: bool) -> None:
        if gather_once:
            model.set_reshard_after_backward(is_last)
            model.set_requires_gradient_sync(is_last)

    step = micro_batches(model, 4, last)
    step()
    with CollectiveCounter(mesh) as counter:
        step()
    return {f"{row.operation} {row.axis}": (row.calls, row.payload, row.wire) for row in counter.table.rows}


@pytest.mark.parametrize(
    ("reshard", "gather_once", "gathers", "scatters"),
    [(True, False, 8 * LAYERS, 4 * LAYERS), (False, True, LAYERS, LAYERS)],
)
def test_fsdp2_counts_equal_theory(reshard: bool, gather_once: bool, gathers: int, scatters: int) -> None:
    for counts in run_spmd(sharded_counts, 2, (2,), reshard, gather_once):
        layer = PARAMETERS // LAYERS
        assert counts == {
            "all_gather data_shard": (gathers, gathers * layer, gathers * layer / 2),
            "reduce_scatter data_shard": (scatters, scatters * layer, scatters * layer / 2),
        }


def test_hybrid_sharding_reduces_shards_between_replicas() -> None:
    for counts in run_spmd(sharded_counts, 4, (2, 2), False, True):
        assert counts["reduce_scatter data_shard"] == (LAYERS, PARAMETERS, PARAMETERS / 2)
        assert counts["all_reduce data_replicate"] == (LAYERS, PARAMETERS // 2, PARAMETERS / 2)


def replicated_counts(rank: int, world: int) -> tuple[int, int, float]:
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=True)
    batch = torch.ones(2, WIDTH)
    with CollectiveCounter({"data_parallel": dist.group.WORLD}) as counter:
        with model.no_sync():
            model(batch).sum().backward()
        assert counter.table.calls("all_reduce") == 0
        model(batch).sum().backward()
    (row,) = counter.table.rows
    assert (row.operation, row.axis) == ("all_reduce", "data_parallel")
    return row.calls, row.payload, row.wire


def test_ddp_counts_equal_theory() -> None:
    for calls, payload, wire in run_spmd(replicated_counts, 2):
        assert calls >= 1
        assert (payload, wire) == (PARAMETERS, PARAMETERS)


def measured(model: nn.Module, step: Any) -> dict[str, int]:
    # Twice: DistributedDataParallel makes its buckets anew after the first step.
    step()
    step()
    with LiveBytes() as live:
        live.track(model, step.optimizer)
        report = measure_peak(live, step, lambda: Owners([model], [step.optimizer])())
        assert report.exact
    return {category.name: size for category, size in report.categories.items()}


def sharded_bytes(rank: int, world: int, reshard: bool, gather_once: bool) -> dict[str, int]:
    model, _ = shard((world,), reshard)
    assert isinstance(model, FSDPModule)

    def last(is_last: bool) -> None:
        model.set_reshard_after_backward(is_last or not gather_once)
        model.set_requires_gradient_sync(is_last or not gather_once)

    return measured(model, micro_batches(model, 2, last))


def test_live_bytes_of_gathered_parameters() -> None:
    for sizes in run_spmd(sharded_bytes, 2, False, True):
        assert sizes["PARAMETER"] == PARAMETERS // 2
        assert sizes["OPTIMIZER"] == PARAMETERS + 4 * 2 * LAYERS
        assert sizes["GATHERED_PARAMETER"] == PARAMETERS
        assert sizes["GATHERED_GRADIENT"] == PARAMETERS
        assert sizes["OTHER"] >= LAYERS * ROWS * WIDTH * 4


def test_live_bytes_of_sharded_parameters() -> None:
    for sizes in run_spmd(sharded_bytes, 2, True, False):
        assert sizes["PARAMETER"] == PARAMETERS // 2
        assert sizes.get("GATHERED_PARAMETER", 0) <= 2 * PARAMETERS // LAYERS


def replicated_bytes(rank: int, world: int) -> dict[str, int]:
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=True)
    return measured(model, micro_batches(model, 2, lambda is_last: None))


def test_live_bytes_of_replicas() -> None:
    for sizes in run_spmd(replicated_bytes, 2):
        assert sizes["PARAMETER"] == PARAMETERS
        # Buckets stay when their views, the gradients, are set to None.
        assert sizes.get("GRADIENT", 0) + sizes.get("COMMUNICATION", 0) == PARAMETERS
        assert sizes["OPTIMIZER"] == 2 * PARAMETERS + 4 * 2 * LAYERS


def test_fake_and_real_runs_agree() -> None:
    real = run_spmd(sharded_bytes, 2, False, True)[0]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fake = sharded_bytes(0, 2, False, True)
    finally:
        dist.destroy_process_group()
    # A backend's thread may free a buffer of one layer a moment late.
    late = real.pop("COMMUNICATION", 0) - fake.pop("COMMUNICATION", 0)
    assert 0 <= late <= 2 * PARAMETERS // LAYERS
    assert fake == real
