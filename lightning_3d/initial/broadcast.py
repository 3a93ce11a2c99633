"""One rank's values for all: modules that every rank built for itself, and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 * 2**20


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank of a group the parameters and buffers of its first rank.

    Tied tensors travel once, tensors on the meta device not at all, and dtypes do not matter: bytes are sent, in
    buckets.

    Args:
        module: The whole module, before it is cut; equal on all ranks but for its values.
        group: The ranks that must agree.
    """
    broadcast_tensors([*module.parameters(), *module.buffers()], group)


class BufferBroadcast:
    """Gives every rank of a group the running statistics of one: of its first, as DDP does, or of each buffer's own.

    Only persistent buffers travel. Names are collected once and looked up at each call, so a buffer that the module
    assigns anew is followed; a module without persistent buffers costs nothing.

    Args:
        module: The module; its buffers are whole on every rank.
        group: The ranks that must agree.
        source: The rank in the group that has the present value of a buffer, by the buffer's name.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, source: Callable[[str], int] = lambda name: 0
    ) -> None:
        self._group = group
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for prefix, part in module.named_modules():
            for name in part._buffers:
                if name not in part._non_persistent_buffers_set:
                    rank = source(f"{prefix}.{name}" if prefix else name)
                    self._places.setdefault(rank, []).append((part, name))

    def __call__(self) -> None:
        """Broadcasts the buffers' present values; a collective call if there are any."""
        for rank, places in sorted(self._places.items()):
            found = (part._buffers.get(name) for part, name in places)
            broadcast_tensors([buffer for buffer in found if buffer is not None], self._group, rank)


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Gives every rank of a group the values that one of them has, in place.

    Args:
        tensors: Alike on all ranks but for their values. Those without memory do not travel.
        group: The ranks.
        source: The one in the group.
    """
    unique = {id(tensor): tensor.detach() for tensor in tensors if not tensor.is_meta and tensor.numel()}
    for bucket in _buckets(unique.values()):
        parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in bucket]
        sent = torch.cat(parts) if len(parts) > 1 else parts[0]
        dist.broadcast(sent, group=group, group_src=source)
        received = sent.split([tensor.nbytes for tensor in bucket])
        for tensor, part in zip(bucket, received, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.size()))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of one device up to a bucket's size; a larger tensor is a bucket of its own."""
    bucket: list[Tensor] = []
    filled = 0
    # The widest dtypes first: then every part of a bucket begins at a multiple of its item size.
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.device), -tensor.itemsize)):
        if bucket and (bucket[0].device != tensor.device or filled + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
