"""A cache that forgets what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentlyUsed(Generic[T]):
    """Things that are costly to make, by what they were made for.

    Args:
        limit: Most things that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what was made for a key, or makes it."""
        if key not in self._kept:
            self.put(key, make())
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: Hashable, made: T) -> None:
        """Keeps what was made for a key."""
        self._kept.pop(key, None)
        while len(self._kept) >= self._limit:
            self._kept.popitem(last=False)
        self._kept[key] = made

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def values(self) -> list[T]:
        """Returns what is kept."""
        return list(self._kept.values())

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
