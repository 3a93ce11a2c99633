"""A rank of a world that does not exist: torch's fake process group, in which every collective returns at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.errors import MeshError


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """Context in which this process is one rank of many.

    Args:
        size: Number of ranks.
        rank: This one.

    Yields:
        The group of all ranks.

    Raises:
        MeshError: The process is a rank of a real world already.
    """
    if dist.is_initialized():
        raise MeshError(
            "a dry run plays the ranks of a world in one process, and this process belongs to a process group already.",
            fix="run it in a process of its own, as `lightning-3d dryrun` does",
        )
    # DTensor keeps its decisions with the mesh of the rank that made them.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = dist.group.WORLD
        assert world is not None, "the group was just made"
        with _sends_hold_tensors():
            yield world
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


class _Works(list[Any]):
    """Sends that wait, with what they send: NCCL holds it until somebody has waited."""

    operations: Sequence[Any] = ()


@contextmanager
def _sends_hold_tensors() -> Iterator[None]:
    begun: Any = schedules._batch_p2p
    waited: Any = schedules._wait_batch_p2p

    def hold(operations: list[Any], *args: Any, **options: Any) -> _Works:
        works = _Works(begun(operations, *args, **options))
        works.operations = operations
        return works

    def release(works: list[Any]) -> None:
        waited(works)
        if isinstance(works, _Works):
            works.operations = ()

    module: Any = schedules
    module._batch_p2p, module._wait_batch_p2p = hold, release
    try:
        yield
    finally:
        module._batch_p2p, module._wait_batch_p2p = begun, waited
