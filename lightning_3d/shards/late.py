"""Scores in 32 bits whose copy is made when it is needed: losses compute in 32 bits from what was there before.

Models widen the scores of all classes before the loss (``logits.float()``): the largest tensor of a step, once more in
double size, and its gradient too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_3d.errors import ModuleError
from lightning_3d.shards.tensor import ShardTensor

# Of fewer classes a copy costs less than putting it off.
_MANY_CLASSES = 4096
_NARROW = (torch.bfloat16, torch.float16)


class View(NamedTuple):
    """How a shard whose copy is late came from another one.

    Attributes:
        base: The other one.
        method: The view.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    base: LateShard
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LateShard(ShardTensor):
    """A shard in 32 bits, as its narrow one until its local tensor is asked for.

    Its views are late as well, and views of the one copy once there is one. To be mixed with the class of the narrow
    one, whose operations it has.
    """

    __slots__ = ("_gradients", "_made", "_narrow", "_version_before", "_view")

    _narrow: ShardTensor
    _view: View | None
    _made: Tensor | None
    _gradients: bool
    _version_before: int

    @classmethod
    def of(cls, narrow: ShardTensor, view: View | None = None) -> Self:
        """Returns what ``narrow`` is in 32 bits.

        Args:
            narrow: A shard in 16 bits.
            view: Where it came from, if it is a view of what is late itself.
        """
        late = torch.Tensor._make_wrapper_subclass(cls, narrow.shape, dtype=torch.float32, device=narrow.device)
        late._dim, late._segments, late._group = narrow._dim, narrow._segments, narrow._group
        late._narrow, late._view, late._made = narrow, view, None
        late._gradients, late._version_before = torch.is_grad_enabled(), narrow._local._version
        return late

    @property
    def pending(self) -> bool:
        """Whether there is no copy yet, so that the narrow values are still the values."""
        return self._made is None and (self._view is None or self._view.base.pending)

    @property
    def before(self) -> Tensor:
        """The narrow local tensor.

        Raises:
            ModuleError: It was written to.
        """
        local = self._narrow._local
        if local._version != self._version_before:
            raise ModuleError(
                "a tensor was changed in place after float() had been called on it, while it is cut over the "
                "tensor-parallel ranks.",
                fix="change it before, or call float() on a clone of it",
            )
        return local

    @property
    def _local(self) -> Tensor:  # type: ignore[override]
        if self._made is None:
            with torch.set_grad_enabled(self._gradients):
                self._made = self._make()
        return self._made

    def _make(self) -> Tensor:
        if self._view is None:
            return self.before.float()
        base, method, args, kwargs = self._view
        whole = base.like(base._local, base._dim, base._segments)
        shard: ShardTensor = getattr(whole, method)(*args, **kwargs)
        return shard._local

    def like(self, local: Tensor, dim: int, segments: tuple[int, ...]) -> Any:
        """Returns the result of an operation, of the class of the narrow one."""
        return self._narrow.like(local, dim, segments)

    def float(self, memory_format: torch.memory_format = torch.preserve_format) -> Self:
        """Returns itself."""
        return self

    def element_size(self) -> int:
        """Of 32 bits."""
        return 4

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """32 bits."""
        return torch.float32

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        """Of 32 bits."""
        return 4

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the whole."""
        return 4 * self.numel()


def can_be_late(shard: ShardTensor) -> bool:
    """Returns whether a shard holds scores of many classes, whose copy in 32 bits is worth putting off."""
    return (
        shard.dtype in _NARROW
        and shard._dim == shard.dim() - 1
        and len(shard._segments) == 1
        and shard._segments[0] >= _MANY_CLASSES
        and not shard.is_inference()
    )


def scores(shard: ShardTensor) -> Tensor:
    """Returns the local tensor, for what computes in 32 bits anyway: as it was before it was widened, if it can be."""
    return shard.before if isinstance(shard, LateShard) and shard.pending else shard._local


def _as_narrow(name: str) -> Callable[..., Any]:
    def method(late: LateShard, *args: Any, **kwargs: Any) -> Any:
        return getattr(late._narrow, name)(*args, **kwargs)

    return method


def _late_view(name: str) -> Callable[..., Any]:
    def method(late: LateShard, *args: Any, **kwargs: Any) -> Any:
        if not late.pending:
            return getattr(super(LateShard, late), name)(*args, **kwargs)
        narrow = getattr(late._narrow, name)(*args, **kwargs)
        if not isinstance(narrow, ShardTensor):
            return narrow.float()
        return type(late).of(narrow, View(late, name, args, kwargs))

    return method


for _name in (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "is_contiguous",
    "is_inference",
    "get_device",
):
    setattr(LateShard, _name, _as_narrow(_name))
for _name in ("shape", "ndim", "device", "is_cuda", "is_cpu", "is_meta", "is_leaf", "requires_grad"):
    setattr(LateShard, _name, property(operator.attrgetter(f"_narrow.{_name}")))
for _name in ("view", "reshape", "flatten", "contiguous", "transpose", "__getitem__"):
    setattr(LateShard, _name, _late_view(_name))
