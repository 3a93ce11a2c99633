"""Writing while training goes on: what is saved is copied first, then written by a thread with a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.packed import PackedTensor

Work = Callable[[dist.ProcessGroup | None], None]


class BackgroundWriter:
    """Does one piece of work after the other, each on all ranks together. Made by all ranks; a collective call.

    Args:
        group: All ranks that save together.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        # Collectives of one group must not meet in two threads.
        alone = group.size() == 1
        self._group = None if alone else dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending: list[Future[None]] = []

    def write(self, work: Work) -> None:
        """Begins a piece of work, when those before are done.

        Raises:
            CheckpointError: On every rank, what an earlier one could not do.
        """
        self.wait()
        self._pending.append(self._thread.submit(work, self._group))

    def afterwards(self, act: Callable[[], None]) -> None:
        """Does something on this rank alone, when the work before is done; only if that has been done well."""
        before = tuple(self._pending)

        def done() -> None:
            if not any(each.exception() for each in before):
                act()

        self._pending.append(self._thread.submit(done))

    def wait(self) -> None:
        """Returns when everything is done.

        Raises:
            CheckpointError: On every rank, what could not be done.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def close(self) -> None:
        """Waits, ends the thread and gives its group back.

        Raises:
            CheckpointError: On every rank, what could not be done.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            # A rank that has failed has given all groups back.
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)


def staged(value: Any) -> Any:
    """Returns nested dicts with a copy of every tensor, in the memory of the host."""
    if isinstance(value, Mapping):
        return {key: staged(part) for key, part in value.items()}
    if isinstance(value, PackedTensor):
        return PackedTensor(staged(value.shards), value.packing)
    if isinstance(value, DTensor):
        local = value._local_tensor.detach().to("cpu", copy=True)
        return DTensor.__new__(DTensor, local, value._spec, requires_grad=False)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
