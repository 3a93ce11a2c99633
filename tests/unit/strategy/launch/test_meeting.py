"""Ranks meet those of their own attempt, whatever others have left in a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_3d.errors import MeshError
from lightning_3d.strategy.launch.meeting import fresh_round

_SHORT = timedelta(seconds=0.2)


def met(store: dist.Store, world: int) -> list[str]:
    """Returns what each rank has found, when all call at once."""
    with ThreadPoolExecutor(world) as ranks:
        calls = [ranks.submit(fresh_round, store, rank, world, timedelta(seconds=20)) for rank in range(world)]
        return [call.result() for call in calls]


def test_every_attempt_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [met(store, world) for world in (3, 3, 2, 4)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == 4


def test_a_rank_does_not_take_the_name_of_an_earlier_attempt() -> None:
    store = dist.HashStore()
    (earlier, _) = met(store, 2)
    with pytest.raises(MeshError, match="rank 0 has not come to meet the others within"):
        fresh_round(store, 1, 2, _SHORT)
    with pytest.raises(MeshError, match="ranks 1, 2 have not come"):
        fresh_round(store, 0, 3, _SHORT)
    assert met(store, 2)[0] != earlier
