"""What must be equal on ranks that compute one sample together."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_3d.errors import BatchError, CheckpointError, ModuleError
from lightning_3d.strategy.faults import replicas
from lightning_3d.strategy.faults.replicas import ReplicaCheck, batch_digest, check_same_checkpoint, share_generators
from tests.spmd.pool import run_spmd


def _draws(rank: int, world: int) -> tuple[float, float, float]:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    assert dist.group.WORLD is not None
    share_generators(dist.group.WORLD)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.spmd
def test_generators_that_nobody_seeded_are_shared() -> None:
    one, two = run_spmd(_draws, 2)
    assert one == two


def _compare(rank: int, world: int) -> list[str]:
    assert dist.group.WORLD is not None
    check = ReplicaCheck(dist.group.WORLD, (4, 5))
    same = {"ids": torch.arange(4), "names": ["a", "b"], "empty": torch.zeros(0, 3)}
    check.batch(same, 0)
    check.tensors([("weight", torch.ones(2)), ("count", torch.tensor(1))])
    texts = []
    for batch in ({**same, "ids": torch.arange(4) + rank}, {**same, "names": ["a", str(rank)]}):
        with pytest.raises(BatchError) as caught:
            check.batch(batch, 3)
        texts.append(str(caught.value))
    with pytest.raises(ModuleError) as other:
        check.tensors([("weight", torch.ones(2)), ("scale", torch.full((2,), float(rank)))])
    return [*texts, str(other.value)]


@pytest.mark.spmd
def test_what_differs_is_named() -> None:
    for texts in run_spmd(_compare, 2):
        assert all("batch 3 differs on model-parallel ranks 5 from rank 4" in text for text in texts[:2])
        assert "'scale' differs" in texts[2]


def test_each_step_of_a_checkpoint_is_told_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [(b"a", 4), (b"b", 2), (b"a", 4), (b"c", 3), (b"b", 2), (b"b", 2)]
    monkeypatch.setattr(replicas, "gather", lambda *_: seen)
    with pytest.raises(CheckpointError) as caught:
        check_same_checkpoint("a.ckpt", 4, [], None)  # type: ignore[arg-type]
    assert caught.value.fact.endswith("of step 4 on rank 0, of step 2 on ranks 1, 4-5, of step 3 on rank 3.")


def test_a_digest_sees_values_dtypes_and_shapes() -> None:
    base = batch_digest({"x": torch.zeros(2, 3), "n": 1})
    assert base == batch_digest({"x": torch.zeros(2, 3), "n": 1})
    for other in (
        {"x": torch.zeros(3, 2), "n": 1},
        {"x": torch.zeros(2, 3, dtype=torch.float64), "n": 1},
        {"x": torch.zeros(2, 3), "n": 2},
        {"y": torch.zeros(2, 3), "n": 1},
    ):
        assert batch_digest(other) != base


def test_objects_count_by_their_class() -> None:
    assert batch_digest([object()]) == batch_digest([object()])
