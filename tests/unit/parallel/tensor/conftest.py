from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def tensor_mesh() -> Iterator[DeviceMesh]:
    """The tensor axis of rank 1 of 2, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    dist.destroy_process_group()
