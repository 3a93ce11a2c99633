"""Key-value caches of Hugging Face models: decoder blocks fill one in training too, where nobody reads it.

Updating a fresh cache is one call of a program, so that it holds after a step what it would hold without replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.protocol import one_call

_MODULE, _BASE, _CLASS = "transformers.cache_utils", "Cache", "DynamicCache"
# Layers that return what they are given as long as they are empty.
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
# How a tensor is cut; the ranks alone if its gradient is partial, None if it is plain.
Cut = tuple[int, tuple[int, ...], ShardGroup] | ShardGroup | None
# A cache, which of its layers was updated, and the class of that layer.
Update = tuple[Any, int, str]


def is_cache(value: Any) -> bool:
    """Returns whether a value is a cache that blocks may update."""
    return any(cls.__name__ == _CLASS and cls.__module__ == _MODULE for cls in type(value).__mro__[:2])


def is_any_cache(value: Any) -> bool:
    """Returns whether a value is a cache of any kind, one that is made of others too."""
    # A slice, which Dynamo can walk through, where a compiled block asks.
    return any((cls.__module__, cls.__name__) == (_MODULE, _BASE) for cls in type(value).__mro__[:])


def fresh_layer(cache: Any, layer: int) -> str | None:
    """Returns the class of a layer of a cache that is still empty; None for any other."""
    if cache.offloading:
        return None
    known = layer < len(cache.layers)
    kind = type(cache.layers[layer]) if known else cache.layer_class_to_replicate
    empty = kind is not None and kind.__name__ in _LAYERS and not (known and cache.layers[layer].get_seq_length())
    return kind.__name__ if empty else None


@one_call
def update_cache(
    keys: Tensor, values: Tensor, cache: Any, layer: int, keys_cut: Cut, values_cut: Cut
) -> tuple[Tensor, Tensor]:
    """Updates an empty layer of a cache with this rank's part of keys and values, and returns its parts of the results.

    Args:
        keys: Local part.
        values: Local part.
        cache: The cache.
        layer: Which of its layers.
        keys_cut: How the keys are cut.
        values_cut: How the values are cut.
    """
    results = cache.update(_closed(keys, keys_cut), _closed(values, values_cut), layer)
    (new_keys, new_keys_cut), (new_values, new_values_cut) = map(_opened, results)
    assert (new_keys_cut, new_values_cut) == (keys_cut, values_cut), "an empty layer returns what it is given"
    return new_keys, new_values


@contextmanager
def noted_updates(caches: Sequence[Any], refuse: Callable[[str], None]) -> Iterator[list[Update]]:
    """Context in which updates of caches are calls of `update_cache`.

    Args:
        caches: The caches; their class is swapped meanwhile.
        refuse: Called with a reason when a cache is asked for anything else.

    Yields:
        The updates so far.
    """
    kinds = [type(cache) for cache in caches]
    updates: list[Update] = []
    for cache, kind in zip(caches, kinds, strict=True):
        cache.__class__ = _noting(kind, refuse, updates)
    try:
        yield updates
    finally:
        for cache, kind in zip(caches, kinds, strict=True):
            cache.__class__ = kind


def _noting(kind: type, refuse: Callable[[str], None], updates: list[Update]) -> type:
    class Noting(kind):  # type: ignore[misc]
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            noting, self.__class__ = self.__class__, kind
            try:
                layer = fresh_layer(self, layer_idx)
                if layer is None:
                    refuse(f"it updates a {_CLASS} that is not empty")
                    result: tuple[Tensor, Tensor] = self.update(key_states, value_states, layer_idx, *args, **kwargs)
                    return result
                updates.append((self, layer_idx, layer))
                (keys, keys_cut), (values, values_cut) = map(_opened, (key_states, value_states))
                results = update_cache(keys, values, self, layer_idx, keys_cut, values_cut)
                return _closed(results[0], keys_cut), _closed(results[1], values_cut)
            finally:
                self.__class__ = noting

        def __getattribute__(self, name: str) -> Any:
            if name != "update" and not name.startswith("__"):
                refuse(f"it reads .{name} of a {_CLASS}")
            return super().__getattribute__(name)

    return Noting


def _opened(tensor: Tensor) -> tuple[Tensor, Cut]:
    if isinstance(tensor, Shard):
        return tensor._local, (tensor._dim, tensor._segments, tensor._group)
    if isinstance(tensor, PartialTensor):
        return tensor.value, tensor._group
    return tensor, None


def _closed(tensor: Tensor, cut: Cut) -> Tensor:
    if isinstance(cut, ShardGroup):
        return PartialTensor(tensor, cut)
    return tensor if cut is None else Shard(tensor, *cut)
