"""Cutting one batch into micro-batches, whatever its structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_3d.errors import BatchError


def slice_sizes(size: int, count: int) -> tuple[int, ...]:
    """Returns the sizes of ``count`` slices of ``size`` samples, as even as possible, larger ones first.

    With fewer samples than slices asked for there is one slice per sample.
    """
    count = max(1, min(size, count))
    share, rest = divmod(size, count)
    return tuple(share + (index < rest) for index in range(count))


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns the micro-batches of a batch, in order.

    Tensors whose first dim is the batch size, and lists or tuples of as many samples, are cut; everything else goes
    whole to each micro-batch. Containers (mappings, lists, tuples, named tuples, dataclasses) keep their type.

    Args:
        batch: What the DataLoader gave.
        sizes: Samples of each micro-batch; they add up to the batch size.
    """
    total = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_cut(batch, total, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def split_by_module(split: Callable[[Any, int], Any], batch: Any, count: int) -> list[Any]:
    """Returns the micro-batches that a module's own ``split_batch(batch, n)`` makes.

    Raises:
        BatchError: It did not return ``count`` of them.
    """
    parts = split(batch, count)
    if not isinstance(parts, (list, tuple)) or len(parts) != count:
        found = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else type(parts).__name__
        raise BatchError(
            f"split_batch(batch, {count}) returned {found}.",
            valid=f"a list of {count} micro-batches",
            fix="return one entry for each micro-batch, in the order of the samples",
        )
    return list(parts)


def _cut(value: Any, total: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() > 0 and value.size(0) == total else value
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {key: _cut(item, total, start, stop) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        if is_samples(value, total):
            return _rebuilt_sequence(value, value[start:stop])
        return _rebuilt_sequence(value, [_cut(item, total, start, stop) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cut(getattr(value, name), total, start, stop) for name in fields})
    return value


def is_samples(value: Sequence[Any], total: int) -> bool:
    """Returns whether a list holds one entry per sample, rather than a few entries that each hold all samples.

    Both have as many entries as samples when a pair (input, target) meets a batch of two. It is the pair if each entry
    holds as many samples, or if one does and the entries are of different kinds.
    """
    if len(value) != total or hasattr(value, "_fields"):
        return False
    holding = [_holds_samples(item, total) for item in value]
    of_one_kind = len({type(item) for item in value}) == 1
    return not (all(holding) or (any(holding) and not of_one_kind))


def _holds_samples(value: Any, total: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.size(0) == total
    if isinstance(value, Mapping):
        return any(_holds_samples(item, total) for item in value.values())
    return isinstance(value, (list, tuple)) and len(value) == total


def _rebuilt_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    kind: Any = type(like)
    return items if kind is dict else kind(items)


def _rebuilt_sequence(like: Any, items: Sequence[Any]) -> Any:
    kind: Any = type(like)
    return kind(*items) if hasattr(like, "_fields") else kind(items)
