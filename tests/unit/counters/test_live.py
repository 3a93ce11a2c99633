from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.counters import Category, LiveBytes, Owners, measure_peak

KIB = 1024


def test_current_and_peak_follow_storages() -> None:
    with LiveBytes() as live:
        with live.phase("first"):
            a = torch.ones(256)
            view = a[3:]
        with live.phase("second"):
            b = a + 1
            assert live.current == 2 * KIB
            del b
        assert live.current == KIB
        del a
        assert live.current == KIB
        del view
        assert live.current == 0
    assert (live.peak.size, live.peak.phase) == (2 * KIB, "second")
    assert str(live.peak) == "2.00 KiB in second"


def test_temporaries_count_at_the_peak_only() -> None:
    with LiveBytes() as live:
        total = (torch.ones(256) * 2 + 1).sum()
    assert live.current == total.nbytes
    assert live.peak.size == 2 * KIB


def test_resized_storages() -> None:
    with LiveBytes() as live:
        a = torch.ones(256)
        a.untyped_storage().resize_(0)
        assert live.current == 0
        a.untyped_storage().resize_(4 * KIB)
        assert live.peak.size == 4 * KIB
        b = torch.empty(0)
        b.resize_(256)
        assert live.current == 5 * KIB


def test_what_existed_before_is_told() -> None:
    model = nn.Linear(16, 16, bias=False)
    model(torch.ones(1, 16)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    with LiveBytes() as live:
        live.track(model, optimizer, [torch.ones(1)])
        assert live.current == 4 * KIB + 4  # the optimizer's step count; the list is gone
        live.track(model)
        assert live.current == 4 * KIB + 4


def test_fake_tensors_count_and_meta_tensors_do_not() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        a = torch.empty(1 << 30, dtype=torch.uint8)
        assert live.current == a.nbytes == 1 << 30
    with LiveBytes() as live:
        torch.empty(256, device="meta")
    assert live.peak.size == 0


def test_global_shapes_inside_dtensor_hold_no_memory() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        mesh = init_device_mesh("cpu", (1024,))
        part = DTensor.from_local(torch.ones(1, 256), mesh, [Shard(0)], run_check=False)
        with LiveBytes() as live:
            total = part + part
            assert total.shape == (1024, 256)
    finally:
        dist.destroy_process_group()
    assert live.peak.size == KIB


def test_patches_end_with_the_context() -> None:
    resize = torch.UntypedStorage.resize_
    with LiveBytes():
        assert torch.UntypedStorage.resize_ is not resize
    with pytest.raises(RuntimeError), LiveBytes():
        torch.ones(2).reshape(3)
    assert torch.UntypedStorage.resize_ is resize


def training(foreach: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model.register_buffer("scale", torch.ones(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    batch = torch.ones(64, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def test_peak_by_category() -> None:
    model, optimizer, step = training()
    with LiveBytes() as live:
        live.track(model, optimizer)
        report = measure_peak(live, step, lambda: Owners([model], [optimizer])())
    assert report.exact
    assert report.categories[Category.PARAMETER] == 8 * KIB
    assert report.categories[Category.OPTIMIZER] == 8 * KIB
    assert report.categories[Category.BUFFER] == 128
    assert report.categories[Category.OTHER] >= 16 * KIB
    assert Category.COMMUNICATION not in report.categories
    assert sum(report.categories.values()) == report.peak.size
    assert str(report).splitlines()[0].startswith("peak ")
    assert "  optimizer                8.00 KiB" in str(report).splitlines()


def test_the_peak_is_that_of_one_step() -> None:
    sizes = iter((256, 512, 256))

    def step() -> None:
        for size in sizes:
            torch.ones(size)

    with LiveBytes() as live:
        report = measure_peak(live, step, dict)
    assert report.categories == {Category.OTHER: 2 * KIB}


def test_a_peak_before_the_step() -> None:
    with LiveBytes() as live:
        kept = torch.ones(256)
        report = measure_peak(live, lambda: None, lambda: {kept.untyped_storage()._cdata: Category.BUFFER})
    assert report.exact
    assert report.categories == {Category.BUFFER: KIB}


def test_gradients_have_their_category() -> None:
    model, optimizer, _ = training()
    owners = Owners([model], [optimizer])()
    assert sorted(owners.values()).count(Category.GRADIENT) == 2
    optimizer.zero_grad()
    assert Category.GRADIENT not in Owners([model], [optimizer])().values()
