"""What a recording holds: operations on storages, and which of them a tensor's value depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "cauchy",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
        "zero",
    )
)
_ALLOCATING = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor as a strided window on a storage.

    Views, ``.data`` and Parameters of one storage are windows on it, so no view operation needs to be recorded.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Window:
        """Describes a tensor; the storage is identified by its address, which is unique while it lives."""
        return cls(
            tensor.untyped_storage()._cdata,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def covers(self, nbytes: int) -> bool:
        """Tells whether the window holds every element of a storage of ``nbytes`` exactly once."""
        dense = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return self.offset == 0 and math.prod(self.size) * self.dtype.itemsize == nbytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Lays the window on a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True, eq=False)
class Constant:
    """A real tensor that was read while recording: kept by reference, cloned when it is about to change."""

    tensor: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One recorded aten operation.

    Attributes:
        function: The operator overload, or a function of torch's that is recorded whole.
        args: Positional arguments; tensors are :class:`Window` or :class:`Constant`.
        kwargs: Keyword arguments, likewise.
        results: One entry per tensor that the operation returns: a window if its storage is new, else None.
        reads: Storages that the operation reads or changes.
        writes: Storages that it creates or changes.
        settles: The part of ``writes`` whose earlier content no longer matters.
        random: Whether it draws random numbers.
        default_dtype: Torch's default dtype at that moment.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Window | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    settles: frozenset[int]
    random: bool
    default_dtype: torch.dtype


@dataclass(slots=True)
class OperationLog:
    """Operations in the order in which they ran, and the storages they speak of."""

    operations: list[Operation] = field(default_factory=list)
    # Holding the storages keeps their addresses unique.
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)

    def know(self, tensor: Tensor) -> Window:
        """Remembers a tensor's storage and returns its window."""
        window = Window.of(tensor)
        self.storages[window.storage] = tensor.untyped_storage()
        return window

    def append(self, operation: Operation) -> None:
        """Adds the next operation."""
        for storage in operation.writes:
            self.writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)

    def slice(self, storage: int) -> list[int]:
        """Finds the operations that decide a storage's content at the end.

        Args:
            storage: The storage.

        Returns:
            Indices into ``operations``, in order; empty if nothing was ever written.
        """
        needed: set[int] = set()
        wanted = [(storage, len(self.operations))]
        while wanted:
            target, end = wanted.pop()
            for index in self._since_settled(target, end):
                if index not in needed:
                    needed.add(index)
                    wanted += [(read, index) for read in self.operations[index].reads]
        return sorted(needed)

    def settled(self, function: torch._ops.OpOverload, changed: Sequence[Window]) -> frozenset[int]:
        """Finds the changed storages that an operator fills whole, whatever was there.

        Args:
            function: The operator overload.
            changed: Windows of the arguments that it changes.

        Returns:
            Storages whose earlier content no longer matters, unless the operator reads them as well.
        """
        if function._schema.name not in _OVERWRITING:
            return frozenset()
        return frozenset(window.storage for window in changed if window.covers(self.storages[window.storage].nbytes()))

    def _since_settled(self, storage: int, end: int) -> Iterable[int]:
        for index in reversed(self.writers.get(storage, ())):
            if index < end:
                yield index
                if storage in self.operations[index].settles:
                    return


def allocates_only(function: torch._ops.OpOverload) -> bool:
    """Tells whether an operator makes a tensor and leaves its content open."""
    return function._schema.name in _ALLOCATING
