"""Processes that do not exist, for tests of what one rank of many does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    # DTensor caches its decisions with the mesh of their first rank, and this process plays several.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
