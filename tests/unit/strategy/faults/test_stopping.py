"""Ranks agree on whether all of them have stopped."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_3d import Mesh3DStrategy
from lightning_3d.strategy.faults.stopping import missing_ranks


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_ranks_that_stop_together_find_nobody_missing(store: dist.Store) -> None:
    def stops(rank: int) -> tuple[int, ...]:
        time.sleep(0.05 * rank)
        return missing_ranks(store, rank, 3, 5.0)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(stops, range(3))) == [(), (), ()]


def test_who_comes_too_late_gets_the_answer_of_those_who_waited(store: dist.Store) -> None:
    assert missing_ranks(store, 1, 3, 0.05) == (0, 2)
    start = time.monotonic()
    assert missing_ranks(store, 2, 3, 5.0) == (0, 2)
    assert missing_ranks(store, 0, 3, 5.0) == (0, 2)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ((), ""),
        ((1,), "rank 1 did not stop with the others"),
        ((1, 2, 5), "ranks 1-2, 5 did not stop with the others"),
    ],
)
def test_those_who_are_missing_are_named(missing: tuple[int, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = Mesh3DStrategy()
    strategy._applied, strategy._run = "the module", SimpleNamespace(stop=SimpleNamespace(missing=lambda: missing))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert strategy._why_not_together() == told
