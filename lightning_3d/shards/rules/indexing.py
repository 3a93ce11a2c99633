"""Operations that take elements by position."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards import nodes
from lightning_3d.shards.along import checked_positions
from lightning_3d.shards.layout import is_even
from lightning_3d.shards.refusal import NeedsSegments, Unshardable
from lightning_3d.shards.rules.entering import cut
from lightning_3d.shards.rules.pointwise import own_operand
from lightning_3d.shards.rules.table import RuleTable, spellings
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()

_EVERYTHING = slice(None)
# A packed weight has fewer parts; more positions are heads, features or tokens.
_MOST_PARTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What a rank takes along the dim that is cut.

    Attributes:
        local: Its own positions.
        segments: How the result is cut.
    """

    local: slice
    segments: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def span(segments: tuple[int, ...], size: int, start: int | None, stop: int | None, step: int | None) -> Span:
    """Finds what a rank takes for a slice of the dim that is cut.

    Exact are whole segments, and every ``step``-th position of all if each rank holds a multiple of ``step``.

    Args:
        segments: How the dim is cut.
        size: Number of ranks.
        start: The slice, in global positions.
        stop: See ``start``.
        step: See ``start``.

    Raises:
        NeedsSegments: It would be exact with these segments.
        Unshardable: It is not exact.
    """
    length = sum(segments)
    first, last, stride = slice(start, stop, step).indices(length)
    if not is_even(segments, size):
        if (first, last, stride) == (0, length, 1):
            return Span(local=_EVERYTHING, segments=segments)
        raise Unshardable(f"positions {first} to {last} of {length} whose parts are uneven")
    if stride != 1:
        if first >= stride or last < length - stride + first + 1 or any(each // size % stride for each in segments):
            raise Unshardable(f"every {stride}th position from {first} to {last} of a dim that is cut")
        return Span(local=slice(first, None, stride), segments=tuple(each // stride for each in segments))
    last = max(first, last)
    ends = (0, *accumulate(segments))
    if first in ends and last in ends and first < last:
        return Span(
            local=slice(first // size, last // size), segments=tuple(segments[ends.index(first) : ends.index(last)])
        )
    raise _between({*ends, first, last}, f"positions {first} to {last} of {length}")


def _between(ends: set[int], reason: str) -> NeedsSegments:
    """Returns the refusal of an operation that takes what lies between these positions."""
    return NeedsSegments([last - first for first, last in pairwise(sorted(ends))], reason)


def _one_of(length: int) -> Unshardable:
    """Returns the refusal of an operation that takes single positions of the dim that is cut."""
    reason = f"one of {length} positions of the dim that is cut"
    return NeedsSegments((1,) * length, reason) if length <= _MOST_PARTS else Unshardable(reason)


@dataclass(frozen=True, slots=True)
class _Place:
    """An index as a rank applies it to its part.

    Attributes:
        index: For the local tensor.
        dim: The dim of the result that is cut.
        segments: How it is cut.
    """

    index: tuple[Any, ...]
    dim: int
    segments: tuple[int, ...]


def _place(x: ShardTensor, index: Any) -> _Place:
    """Translates an index of the whole tensor.

    Raises:
        Unshardable: It takes what the ranks do not hold evenly.
    """
    items: list[Any] = []
    segments = x._segments
    # Of each dim before tensors are applied: whether one of them indexes it.
    indexed: list[bool] = []
    at = position = rank = 0
    for item in _spelled_out(index, x._local.dim()):
        if item is None:
            indexed.append(False)
        elif isinstance(item, Tensor):
            covered = item.dim() if item.dtype == torch.bool else 1
            if at <= x._dim < at + covered:
                raise Unshardable("a tensor indexes the dim that is cut")
            rank = max(rank, 1 if item.dtype == torch.bool else item.dim())
            indexed.extend([True] * covered)
            at += covered
        elif isinstance(item, slice):
            if at == x._dim:
                position = len(indexed)
                if item != _EVERYTHING:
                    taken = span(segments, x._group.size, item.start, item.stop, item.step)
                    item, segments = taken.local, taken.segments
            indexed.append(False)
            at += 1
        elif at == x._dim:
            raise _one_of(x.size(at))
        else:
            at += 1
        items.append(item)
    return _Place(tuple(items), _moved(position, indexed, rank), segments)


def _moved(position: int, indexed: list[bool], rank: int) -> int:
    """Returns where a dim is after tensors are applied: their dims replace theirs, or come first if they were apart."""
    count = sum(indexed)
    if not count:
        return position
    first = indexed.index(True)
    together = all(indexed[first : first + count])
    return position - sum(indexed[:position]) + (rank if first < position or not together else 0)


def _spelled_out(index: Any, dims: int) -> list[Any]:
    """Returns one item for each dim and each new one: None, a slice, a number or a tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.tensor(item) if isinstance(item, list) else item for item in items]
    if not all(item is None or item is Ellipsis or _is_position(item) for item in items):
        raise Unshardable("an index of this kind")
    used = sum(_covered(item) for item in items)
    rests = [place for place, item in enumerate(items) if item is Ellipsis]
    if used > dims or len(rests) > 1:
        raise Unshardable("too many indices")
    rest = [_EVERYTHING] * (dims - used)
    if not rests:
        return items + rest
    return items[: rests[0]] + rest + items[rests[0] + 1 :]


def _is_position(item: Any) -> bool:
    if isinstance(item, Tensor):
        return not isinstance(item, ShardTensor) and item.dtype != torch.uint8 and item.dim() > 0
    return isinstance(item, (int, slice)) and not isinstance(item, bool)


def _covered(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _dim_left_whole(x: ShardTensor, index: Any) -> int | None:
    """Returns where the cut dim is after an index without tensors that takes all of it, the common case; else None."""
    cut_dim, at, moved = x._dim, 0, 0
    items = index if type(index) is tuple else (index,)
    for place, item in enumerate(items):
        kind = type(item)
        if item is None:
            moved += at <= cut_dim
        elif item is Ellipsis:
            at = max(at, x._local.dim() - sum(type(each) in (slice, int) for each in items[place + 1 :]))
        elif kind is slice and (at != cut_dim or item == _EVERYTHING):
            at += 1
        elif kind is int and at != cut_dim:
            moved -= at < cut_dim
            at += 1
        else:
            return None
    return cut_dim + moved


@table.rule(Tensor.__getitem__)
def getitem(x: Any, index: Any) -> Any:
    """Takes elements by position."""
    if not isinstance(x, ShardTensor):
        raise Unshardable("its index is cut")
    dim = _dim_left_whole(x, index)
    if dim is not None:
        return x.like(x._local[index], dim, x._segments)
    place = _place(x, index)
    return x.like(x._local[place.index], place.dim, place.segments)


@table.rule(Tensor.__setitem__)
def setitem(x: Any, index: Any, value: Any) -> None:
    """Writes elements by position, or where a mask of the same shape says so."""
    if not isinstance(x, ShardTensor):
        raise Unshardable("a replicated tensor is written to")
    is_tensor = isinstance(value, Tensor)
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == x.dim():
        if is_tensor and value.dim():
            raise Unshardable("elements of a mask over the dim that is cut")
        x._local.masked_fill_(own_operand(index, x), own_operand(value, x))
        return
    place = _place(x, index)
    if is_tensor:
        value = own_operand(value, x.like(x._local.detach()[place.index], place.dim, place.segments))
    x._local[place.index] = value


@table.rule(*spellings("select"))
def select(x: ShardTensor, dim: int, index: int) -> ShardTensor:
    """Takes one position of a dim."""
    at = dim % x._local.dim()
    if at == x._dim:
        raise _one_of(x.size(at))
    return x.like(x._local.select(at, index), x._dim - (at < x._dim), x._segments)


@table.rule(*spellings("narrow"))
def narrow(x: ShardTensor, dim: int, start: Any, length: int) -> ShardTensor:
    """Takes a run of positions."""
    at, first = dim % x._local.dim(), int(start)
    if at != x._dim:
        return x.like(x._local.narrow(at, first, length), x._dim, x._segments)
    first += x.size(at) if first < 0 else 0
    taken = span(x._segments, x._group.size, first, first + length, None)
    return x.like(x._local[(_EVERYTHING,) * at + (taken.local,)], at, taken.segments)


@table.rule(*spellings("index_select"))
def index_select(x: Any, dim: int, index: Tensor) -> ShardTensor:
    """Takes the positions that a tensor names."""
    if not isinstance(x, ShardTensor) or isinstance(index, ShardTensor) or dim % x.dim() == x._dim:
        raise Unshardable("a tensor indexes the dim that is cut")
    return x.like(x._local.index_select(dim, index), x._dim, x._segments)


@table.rule(*spellings("gather"))
def gather(x: Any, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """Takes for each element the position that a tensor names; along the dim that is cut, each from its rank."""
    if not isinstance(x, ShardTensor):
        raise Unshardable("its index is cut")
    at = dim % x.dim()
    if at != x._dim:
        return x.like(x._local.gather(at, _own_index(x, index)), x._dim, x._segments)
    if isinstance(index, ShardTensor) or len(x._segments) > 1:
        raise Unshardable("positions along the dim that is cut")
    own, held = checked_positions(index, x._group, x.size(at))
    return nodes.reduce(x._local.gather(at, own).masked_fill(~held, 0), x._group)


@table.rule(*spellings("take_along_dim"))
def take_along_dim(x: Any, indices: Tensor, dim: int | None = None) -> Any:
    """Takes for each element the position that a tensor names, which broadcasts along the other dims."""
    if not isinstance(x, ShardTensor) or isinstance(indices, ShardTensor) or dim is None or indices.dim() != x.dim():
        raise Unshardable("positions in the whole")
    at, shape = dim % x.dim(), list(x.shape)
    if any(indices.size(each) not in (1, length) for each, length in enumerate(shape) if each != at):
        raise Unshardable("the tensor broadcasts too")
    shape[at] = indices.size(at)
    return gather(x, at, indices.expand(shape))


def _own_index(x: ShardTensor, index: Tensor) -> Tensor:
    if isinstance(index, ShardTensor):
        if index.cut != x.cut:
            raise Unshardable(f"its index is cut differently: {x.cut} and {index.cut}")
        return index._local
    if index.size(x._dim) != x.size(x._dim):
        raise Unshardable("its index does not cover the dim that is cut")
    return cut(index, x._group, x._dim, x._segments)


# ---- several runs of one dim ----


def _pieces(x: ShardTensor, dim: int, lengths: Sequence[int]) -> tuple[ShardTensor, ...]:
    """Takes runs that follow each other and make up the dim."""
    at, local = dim % x._local.dim(), x._local
    if at != x._dim:
        return tuple([x.like(piece, x._dim, x._segments) for piece in local.split(list(lengths), at)])
    if x.uneven:
        raise Unshardable(f"pieces of {x.size(at)} positions whose parts are uneven")
    plan = _piece_plan(x._segments, tuple(lengths))
    pieces = local.split([sum(segments) // x._group.size for segments in plan], at)
    return tuple([x.like(piece, at, segments) for piece, segments in zip(pieces, plan, strict=True)])


@functools.lru_cache(maxsize=4096)
def _piece_plan(segments: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the segments of each piece."""
    bounds = (0, *accumulate(lengths))
    ends = (0, *accumulate(segments))
    if bounds[-1] != ends[-1]:
        raise Unshardable(f"pieces of {lengths} do not make up {ends[-1]}")
    if not set(bounds) <= set(ends) or 0 in lengths:
        raise _between({*bounds, *ends}, f"pieces of {'|'.join(map(str, lengths))}")
    places = [ends.index(bound) for bound in bounds]
    return tuple(segments[first:last] for first, last in pairwise(places))


def _equal_lengths(total: int, length: int) -> list[int]:
    return [min(length, total - start) for start in range(0, total, length)] if length > 0 else [total]


@table.rule(torch.split, Tensor.split, *spellings("split_with_sizes"))
def split(x: ShardTensor, split_size_or_sections: Any, dim: int = 0) -> tuple[ShardTensor, ...]:
    """Pieces of one length, or of given ones."""
    asked = split_size_or_sections
    return _pieces(x, dim, _equal_lengths(x.size(dim), asked) if isinstance(asked, int) else asked)


@table.rule(*spellings("chunk"))
def chunk(x: ShardTensor, chunks: int, dim: int = 0) -> tuple[ShardTensor, ...]:
    """At most so many pieces of one length."""
    length = x.size(dim)
    return _pieces(x, dim, _equal_lengths(length, -(-length // chunks)))


@table.rule(*spellings("tensor_split"))
def tensor_split(x: ShardTensor, indices_or_sections: Any, dim: int = 0) -> tuple[ShardTensor, ...]:
    """So many pieces of nearly one length, or pieces between positions."""
    length, asked = x.size(dim), indices_or_sections
    if isinstance(asked, int):
        lengths = [length // asked + (piece < length % asked) for piece in range(asked)]
    elif isinstance(asked, Tensor):
        raise Unshardable("positions in a tensor")
    else:
        bounds = [0, *(min(max(each + length if each < 0 else each, 0), length) for each in asked), length]
        lengths = [last - first for first, last in pairwise(bounds)]
    if min(lengths) < 0:
        raise Unshardable("positions that go back")
    return _pieces(x, dim, lengths)


@table.rule(*spellings("unbind"))
def unbind(x: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    """Every position of a dim."""
    at = dim % x._local.dim()
    if at == x._dim:
        raise _one_of(x.size(at))
    return tuple([x.like(piece, x._dim - (at < x._dim), x._segments) for piece in x._local.unbind(at)])
