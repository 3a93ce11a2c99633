"""Whether a parameter between steps was written to: by itself, by its ``.data``, in a list, or through a view of it.

torch counts writes to a tensor, but on a DTensor those alone that name it, and not what ``torch._foreach_*``,
optimizers and ``.data`` do to its local part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Self

_NAME = "_writes"


class Writes:
    """How often a piece of memory was written to through the tensors that share it.

    Attributes:
        count: Grows with each write.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy has memory of its own.
        return type(self)()


def count_writes(targets: Iterable[Any]) -> None:
    """Counts a write to each of some tensors that count them, or lists of tensors."""
    for tensor in tensors_in(targets):
        writes: Writes | None = getattr(tensor, _NAME, None)
        if writes is not None:
            writes.count += 1


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Returns the tensors among arguments, those of lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def version_of(parameter: Tensor) -> Hashable:
    """Returns what differs once a parameter was written to."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    writes: Writes | None = getattr(parameter, _NAME, None)
    return local._version, parameter._version if writes is None else writes.count
