"""The ranks that a tensor is cut over, and the four ways in which they exchange values."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.shards.layout import join, padded
from lightning_3d.shards.protocol import storage_key

# How many replicated tensors share the sum of their gradients at a time: the input of q, k and v, that of a
# cross-attention, and weights of norms that are used between them.
_SHARED_COPIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """How operations on shards behave.

    Attributes:
        sequence: Sums of partial results are left cut over the sequence (sequence parallelism).
        exact_random: Dropout draws the mask of one device and takes its part.
    """

    sequence: bool = False
    exact_random: bool = False


class ShardGroup(ABC):
    """What a shard tensor needs to know of the ranks it is cut over.

    Values that every rank holds alike are called replicated. All methods are collective.

    Args:
        size: Number of ranks.
        rank: This one's position.
        options: How operations behave.
    """

    def __init__(self, size: int, rank: int, options: ShardOptions | None = None) -> None:
        self.size = size
        self.rank = rank
        self.options = options or ShardOptions()
        self._copies: deque[tuple[weakref.ref[Tensor], int, Tensor]] = deque(maxlen=_SHARED_COPIES)
        self._rows: dict[int, tuple[int, ...]] = {}
        self._gathers: set[tuple[str, str]] = set()
        self._summed: set[int] = set()

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Returns the sum over the ranks as a new tensor."""

    @abstractmethod
    def max(self, value: Tensor) -> Tensor:
        """Returns the largest of each element over the ranks as a new tensor."""

    @abstractmethod
    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """Returns the whole tensor from every rank's part; ``segments`` are global lengths."""

    @abstractmethod
    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of the sum over the ranks (reduce-scatter), cut evenly along ``dim``."""

    def shared_copy(self, value: Tensor) -> Tensor | None:
        """Returns the copy that was kept for exactly this tensor, so that its gradients are summed once."""
        for index, (reference, version, copy) in enumerate(self._copies):
            if reference() is value and version == value._version:
                del self._copies[index]
                self.keep_copy(value, copy)
                return copy
        return None

    def keep_copy(self, value: Tensor, copy: Tensor) -> None:
        """Remembers a copy for the next few operations."""
        self._copies.append((weakref.ref(value), value._version, copy))

    def rows_of(self, length: int) -> tuple[int, ...] | None:
        """Returns the segments of the rows that were flattened to this many and gathered last, if any were."""
        return self._rows.get(length)

    def keep_rows(self, segments: tuple[int, ...]) -> None:
        """Remembers how rows are cut, for the sum that gives as many of them back."""
        self._rows[sum(segments)] = segments

    def will_sum(self, weight: Tensor) -> None:
        """Remembers that products with a weight are partial results, which are summed over the ranks.

        Weights that train alone: they live as long as the group, and what else has come to their memory would be taken
        for them.
        """
        if _is_trained(weight):
            self._summed.add(storage_key(weight))

    def sums(self, weight: Tensor) -> bool:
        """Returns whether products with a weight are partial results, as far as is known.

        A weight that was cast for the product is not recognised.
        """
        return storage_key(weight) in self._summed

    def first_gather(self, operation: str, place: str) -> bool:
        """Returns whether an operation without a rule is met at a place for the first time, and remembers it."""
        known = (operation, place) in self._gathers
        self._gathers.add((operation, place))
        return not known

    def forget_copies(self) -> None:
        """Lets the copies go: at the end of a step, and around anything that is recomputed."""
        self._copies.clear()
        self._rows.clear()


def _is_trained(weight: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return weight.is_leaf and weight.requires_grad


class ProcessShardGroup(ShardGroup):
    """Ranks that are processes.

    Args:
        group: The tensor axis.
        options: How operations behave.
    """

    def __init__(self, group: dist.ProcessGroup, options: ShardOptions | None = None) -> None:
        super().__init__(group.size(), group.rank(), options)
        self._group = group
        # gloo has no reduce-scatter of tensors on the CPU that is as exact as its all-reduce.
        self._scatters = dist.get_backend(group) != "gloo"

    def sum(self, value: Tensor) -> Tensor:
        """All-reduces a copy."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def max(self, value: Tensor) -> Tensor:
        """All-reduces a copy."""
        largest = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """All-gathers."""
        mine = padded(part, dim, segments, self.size).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return join(parts, dim, segments)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Reduce-scatters; by an all-reduce where the backend has none."""
        length = value.shape[dim] // self.size
        if not self._scatters:
            return self.sum(value).narrow(dim, self.rank * length, length).contiguous()
        parts = [piece.contiguous() for piece in value.split(length, dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=self._group)
        return mine
