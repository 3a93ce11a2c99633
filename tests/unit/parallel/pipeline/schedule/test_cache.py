from __future__ import annotations

import contextlib

from lightning_3d.parallel.pipeline.schedule.cache import RecentlyUsed


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    made: list[str] = []

    def get(cache: RecentlyUsed[str], key: str) -> str:
        return cache.get(key, lambda: made.append(key) or key.upper())

    cache: RecentlyUsed[str] = RecentlyUsed(2)
    for key in ("a", "b", "a", "c", "a"):
        assert get(cache, key) == key.upper()
    assert made == ["a", "b", "c"]
    assert get(cache, "b") == "B"
    assert made == ["a", "b", "c", "b"]
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0


def test_what_cannot_be_made_is_not_kept() -> None:
    cache: RecentlyUsed[int] = RecentlyUsed(1)
    with contextlib.suppress(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)
    assert cache.get("a", lambda: 3) == 3


def test_what_was_made_elsewhere_is_kept_too() -> None:
    cache: RecentlyUsed[str] = RecentlyUsed(2)
    for key in ("one", "two", "one", "three"):
        cache.put(key, key)
    assert [key in cache for key in ("one", "two", "three")] == [True, False, True]
    assert cache.get("one", lambda: "new") == "one"
