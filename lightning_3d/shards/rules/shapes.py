"""Operations that give elements another shape and leave their order within the dims: views."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.layout import is_even
from lightning_3d.shards.refusal import NeedsSegments, Unshardable
from lightning_3d.shards.rules.table import Function, RuleTable, spellings
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()

# More runs than these cost more than the gather that they spare.
_MOST_SEGMENTS = 1024

Plan = tuple[tuple[int, ...], int, tuple[int, ...]]


@functools.lru_cache(maxsize=4096)
def view_plan(local_shape: tuple[int, ...], dim: int, segments: tuple[int, ...], size: int, target: Any) -> Plan:
    """Finds how the whole tensor is cut after a view.

    Seen flat, a rank holds a run of each segment, once for each position of the dims before. The view is exact if one
    dim of the target explains the same runs. That dim is unique.

    Args:
        local_shape: Shape of a rank's part.
        dim: The dim that is cut.
        segments: Its segments.
        size: Number of ranks.
        target: Global shape to be; one length may be -1.

    Returns:
        The local shape to be, the dim that is cut and its segments.

    Raises:
        NeedsSegments: It would be exact with these segments of ``dim``.
        Unshardable: It is not exact.
    """
    shape = (*local_shape[:dim], sum(segments), *local_shape[dim + 1 :])
    wanted = _without_unknown([int(length) for length in target], math.prod(shape))
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    reason = f"view of {shape}, cut along dim {dim}, as {tuple(wanted)}"
    if not is_even(segments, size):
        return _with_the_same_dim(local_shape[dim], segments, (before, shape[dim], after), wanted, reason)
    pattern = _period(segments)
    repeats = before * (len(segments) // len(pattern))
    runs = [segment * after for segment in pattern]
    for index in range(len(wanted)):
        outer, inner = math.prod(wanted[:index]), math.prod(wanted[index + 1 :])
        if outer and inner and repeats % outer == 0 and all(run % (inner * size) == 0 for run in runs):
            if len(pattern) * (repeats // outer) > _MOST_SEGMENTS:
                raise Unshardable(f"view of {shape} as {tuple(wanted)} leaves too many segments")
            local = (*wanted[:index], wanted[index] // size, *wanted[index + 1 :])
            return local, index, tuple(run // inner for run in runs) * (repeats // outer)
    _ask_for_segments(shape[dim], before, after, size, wanted, reason)
    raise Unshardable(f"{reason}: no dim of it can be cut in {size}")


def _with_the_same_dim(
    own: int, segments: tuple[int, ...], parts: tuple[int, int, int], wanted: Sequence[int], reason: str
) -> Plan:
    """The plan of a dim whose parts are uneven, which has to stay as it is."""
    for index, length in enumerate(wanted):
        if (math.prod(wanted[:index]), length, math.prod(wanted[index + 1 :])) == parts:
            return (*wanted[:index], own, *wanted[index + 1 :]), index, segments
    raise Unshardable(f"{reason}: its parts are uneven")


def _without_unknown(target: list[int], elements: int) -> list[int]:
    if -1 not in target:
        if math.prod(target) != elements:
            raise Unshardable(f"{elements} elements do not fit {tuple(target)}")
        return target
    known = -math.prod(target)
    if target.count(-1) > 1 or known <= 0 or elements % known:
        raise Unshardable(f"{elements} elements do not fit {tuple(target)}")
    return [elements // known if length == -1 else length for length in target]


def _period(segments: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shortest pattern that makes the segments when it is repeated."""
    count = len(segments)
    for length in range(1, count):
        if count % length == 0 and segments[:length] * (count // length) == segments:
            return segments[:length]
    return segments


def _ask_for_segments(length: int, before: int, after: int, size: int, wanted: Sequence[int], reason: str) -> None:
    for index in range(len(wanted)):
        outer, inner = math.prod(wanted[:index]), math.prod(wanted[index + 1 :])
        if not outer or not inner or outer % before:
            continue
        count = outer // before
        if count > 1 and length % count == 0 and (length // count * after) % (inner * size) == 0:
            raise NeedsSegments((length // count,) * count, reason)


def _viewed(x: ShardTensor, target: Sequence[int]) -> ShardTensor:
    local = x._local
    shape, dim, segments = view_plan(local.shape, x._dim, x._segments, x._group.size, tuple(target))
    return x.like(local.reshape(shape), dim, segments)


def _lengths(sizes: tuple[Any, ...]) -> Sequence[int]:
    """Returns the lengths of a call that takes them one by one or in one sequence."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


@table.rule(Tensor.view)
def view(x: ShardTensor, *shape: Any, size: Any = None, dtype: torch.dtype | None = None) -> ShardTensor:
    """Other lengths, or the same memory as another type."""
    asked = shape or (size if size is not None else dtype,)
    if isinstance(asked[0], torch.dtype):
        if x._dim == x._local.dim() - 1 and asked[0].itemsize != x._local.itemsize:
            raise Unshardable("its last dim is cut and changes its length")
        return x.like(x._local.view(asked[0]), x._dim, x._segments)
    return _viewed(x, _lengths(asked))


@table.rule(Tensor.reshape, torch.reshape)
def reshape(x: ShardTensor, *sizes: Any, shape: Any = None) -> ShardTensor:
    """Other lengths."""
    return _viewed(x, _lengths(sizes or (shape,)))


@table.rule(Tensor.view_as, Tensor.reshape_as)
def view_as(x: Any, other: Tensor) -> Any:
    """The lengths of another tensor."""
    return x.reshape(other.shape)


@table.rule(*spellings("flatten"))
def flatten(x: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> ShardTensor:
    """Several dims as one."""
    shape, count = x.shape, x.dim()
    first, last = start_dim % count, end_dim % count
    return _viewed(x, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@table.rule(*spellings("ravel"))
def ravel(x: ShardTensor) -> ShardTensor:
    """All dims as one."""
    return _viewed(x, (-1,))


@table.rule(*spellings("unflatten"))
def unflatten(x: ShardTensor, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """One dim as several."""
    shape, at = x.shape, dim % x.dim()
    return _viewed(x, (*shape[:at], *_without_unknown(list(sizes), shape[at]), *shape[at + 1 :]))


# ---- dims in another order ----


@table.rule(*spellings("transpose"), *spellings("swapdims"))
def transpose(x: ShardTensor, dim0: int, dim1: int) -> ShardTensor:
    """Two dims in each other's place."""
    local, cut = x._local, x._dim
    first, second = dim0 % local.dim(), dim1 % local.dim()
    dim = second if cut == first else first if cut == second else cut
    return x.like(local.transpose(first, second), dim, x._segments)


@table.rule(*spellings("swapaxes"))
def swapaxes(x: ShardTensor, axis0: int, axis1: int) -> ShardTensor:
    """Two dims in each other's place."""
    return transpose(x, axis0, axis1)


@table.rule(*spellings("t"))
def t(x: ShardTensor) -> ShardTensor:
    """A matrix with its dims exchanged."""
    return x.like(x._local.t(), x._local.dim() - 1 - x._dim, x._segments)


@table.rule(*spellings("adjoint"))
def adjoint(x: ShardTensor) -> ShardTensor:
    """The conjugate of the last two dims exchanged."""
    return transpose(x.like(x._local.conj(), x._dim, x._segments), -2, -1)


@table.rule(*spellings("permute"))
def permute(x: ShardTensor, *dims: Any, **named: Any) -> ShardTensor:
    """Dims in any order."""
    local = x._local
    order = [dim % local.dim() for dim in _lengths(dims or (named["dims"],))]
    return x.like(local.permute(order), order.index(x._dim), x._segments)


@table.rule(*spellings("movedim"), *spellings("moveaxis"))
def movedim(x: ShardTensor, source: Any, destination: Any) -> ShardTensor:
    """Some dims in another place."""
    count = x.dim()
    moved = [source] if isinstance(source, int) else list(source)
    places = [destination] if isinstance(destination, int) else list(destination)
    order: list[int] = [dim for dim in range(count) if dim not in {each % count for each in moved}]
    for place, dim in sorted((place % count, dim % count) for place, dim in zip(places, moved, strict=True)):
        order.insert(place, dim)
    return permute(x, order)


def _reversed(x: ShardTensor) -> ShardTensor:
    return permute(x, *reversed(range(x.dim())))


def _matrix_transposed(x: ShardTensor) -> ShardTensor:
    return transpose(x, -2, -1)


PROPERTIES: Mapping[str, Function] = MappingProxyType(
    {"T": _reversed, "mT": _matrix_transposed, "H": adjoint, "mH": adjoint}
)

# ---- dims more or fewer ----


@table.rule(*spellings("squeeze"))
def squeeze(x: ShardTensor, dim: Any = None) -> ShardTensor:
    """Without dims of length one."""
    local, count = x._local, x._local.dim()
    asked = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = sorted({each % count for each in asked if local.size(each) == 1 and each % count != x._dim})
    if not gone:
        return x.like(local.view_as(local), x._dim, x._segments)
    return x.like(local.squeeze(gone), x._dim - sum(each < x._dim for each in gone), x._segments)


@table.rule(*spellings("unsqueeze"))
def unsqueeze(x: ShardTensor, dim: int) -> ShardTensor:
    """With one more dim."""
    local = x._local
    at = dim % (local.dim() + 1)
    return x.like(local.unsqueeze(at), x._dim + (at <= x._dim), x._segments)


@table.rule(Tensor.expand, *spellings("broadcast_to"))
def expand(x: ShardTensor, *sizes: Any, size: Any = None) -> ShardTensor:
    """Dims of length one repeated without copies, and more dims in front."""
    local = x._local
    lengths = list(_lengths(sizes or (size,)))
    dim = len(lengths) - local.dim() + x._dim
    if dim < x._dim or lengths[dim] not in (-1, x.size(x._dim)):
        raise Unshardable(f"{tuple(x.shape)} does not expand to {tuple(lengths)}")
    lengths[dim] = -1
    return x.like(local.expand(lengths), dim, x._segments)


@table.rule(Tensor.expand_as)
def expand_as(x: Any, other: Tensor) -> Any:
    """To the lengths of another tensor."""
    return x.expand(other.shape)


@table.rule(Tensor.repeat)
def repeat(x: ShardTensor, *repeats: Any, **named: Any) -> ShardTensor:
    """Copies along dims: a cut dim has its segments once more for each."""
    times = _lengths(repeats or (named["repeats"],))
    dim = len(times) - x._local.dim() + x._dim
    if dim < x._dim or not 0 < len(x._segments) * times[dim] <= _MOST_SEGMENTS or (times[dim] > 1 and x.uneven):
        raise Unshardable(f"{tuple(x.shape)} is repeated {tuple(times)} times")
    return x.like(x._local.repeat(*times), dim, x._segments * times[dim])


@table.rule(*spellings("tile"))
def tile(x: ShardTensor, *dims: Any, **named: Any) -> ShardTensor:
    """Copies along the last dims."""
    times = tuple(_lengths(dims or (named["dims"],)))
    return repeat(x, (1,) * (x.dim() - len(times)) + times)


@table.rule(Tensor.contiguous)
def contiguous(x: ShardTensor, memory_format: torch.memory_format = torch.contiguous_format) -> ShardTensor:
    """In memory as the dims say."""
    local = x._local.contiguous(memory_format=memory_format)
    return x if local is x._local else x.like(local, x._dim, x._segments)


@table.rule(*spellings("view_as_real"))
def view_as_real(x: ShardTensor) -> ShardTensor:
    """Complex numbers as pairs."""
    return x.like(torch.view_as_real(x._local), x._dim, x._segments)


@table.rule(*spellings("view_as_complex"))
def view_as_complex(x: ShardTensor) -> ShardTensor:
    """Pairs as complex numbers."""
    if x._dim == x.dim() - 1:
        raise Unshardable("the pairs are cut")
    return x.like(torch.view_as_complex(x._local), x._dim, x._segments)


@table.rule(Tensor.unfold)
def unfold(x: ShardTensor, dimension: int, size: int, step: int) -> ShardTensor:
    """Windows along a dim."""
    if dimension % x.dim() == x._dim:
        raise Unshardable("windows along the dim that is cut")
    return x.like(x._local.unfold(dimension, size, step), x._dim, x._segments)


@table.rule(*spellings("diagonal"))
def diagonal(x: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """The diagonal of two dims as the last one."""
    gone = {dim1 % x.dim(), dim2 % x.dim()}
    if x._dim in gone:
        raise Unshardable("the diagonal crosses the dim that is cut")
    return x.like(x._local.diagonal(offset, dim1, dim2), x._dim - sum(each < x._dim for each in gone), x._segments)
