from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.initial import broadcast
from lightning_3d.initial.broadcast import BufferBroadcast, broadcast_module


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup) -> list[Tensor]:
    """What was broadcast; the first rank answers with all bytes raised by one."""
    calls: list[Tensor] = []
    real = dist.broadcast

    def raised(tensor: Tensor, *, group: dist.ProcessGroup, group_src: int) -> None:
        real(tensor, group=group, group_src=group_src)
        calls.append(tensor.clone())
        tensor.add_(1)

    monkeypatch.setattr(dist, "broadcast", raised)
    return calls


class Mixed(nn.Module):
    """Every kind of tensor that may travel."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Buffer(torch.tensor([False, False, False]))
        self.weight = nn.Parameter(torch.zeros(3, 4).t())
        self.tied = self.weight
        self.halved = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.complex = nn.Buffer(torch.zeros(2, dtype=torch.complex128))
        self.count = nn.Buffer(torch.tensor(0))
        self.empty = nn.Buffer(torch.empty(0, 3))
        self.cache = nn.Buffer(torch.zeros(2), persistent=False)
        self.meta = nn.Parameter(torch.zeros(2, device="meta"))


def test_module_travels_once_in_one_bucket_of_bytes(group: dist.ProcessGroup, sent: list[Tensor]) -> None:
    module = Mixed()
    broadcast_module(module, group)
    assert [len(call) for call in sent] == [3 + 48 + 6 + 32 + 8 + 8]
    one = torch.tensor([1, 1, 1, 1], dtype=torch.uint8).view(torch.float32)
    assert torch.equal(module.weight, one.expand(4, 3))
    assert module.weight.stride() == (1, 4)
    assert module.flag.all()
    assert module.count.item() == 0x0101010101010101
    assert module.halved.view(torch.int16).tolist() == [0x0101] * 3
    assert torch.equal(module.cache, one.expand(2))
    assert module.meta.is_meta


def test_buckets_are_bounded(group: dist.ProcessGroup, sent: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 64)
    module = nn.ParameterList([torch.zeros(size) for size in (4, 8, 40, 2, 2)])
    broadcast_module(module, group)
    assert [len(call) for call in sent] == [48, 160, 16]
    assert all((parameter != 0).all() for parameter in module)


def test_one_rank_alone_keeps_its_values(group: dist.ProcessGroup) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    broadcast_module(module, group)
    BufferBroadcast(module, group)()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_only_persistent_buffers_follow_training(group: dist.ProcessGroup, sent: list[Tensor]) -> None:
    module = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "mixed": Mixed()})
    follow = BufferBroadcast(module, group)
    follow()
    assert len(sent) == 1
    assert module["norm"].running_mean.ne(0).all()
    assert module["mixed"].cache.eq(0).all()
    assert module["mixed"].weight.eq(0).all()
    replaced = torch.zeros(3)
    module["norm"].running_mean = replaced
    module["norm"].running_var = None
    follow()
    assert replaced.ne(0).all()


def test_modules_without_persistent_buffers_send_nothing(group: dist.ProcessGroup, sent: list[Tensor]) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    BufferBroadcast(module, group)()
    assert sent == []
