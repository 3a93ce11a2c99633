"""What a training needs is gone after it: memory, and threads of process groups, which would go on looking for work."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.features.here import CUBE, DATA_0, DATA_3, PIPELINE, TENSOR, Here, Mesh
from tests.features.modules import Data, Module
from tests.spmd.pool import run_spmd

RECOMPUTED = Mesh(name="recomputed", strategy={**(TENSOR.strategy or {}), "activation_checkpointing": "full"}, world=2)
ALL = Mesh(name=CUBE.name, strategy={**(CUBE.strategy or {}), "zero_stage": 3}, world=8, data=2)

_LOOKS, _SECONDS = 20, 0.1


def fits(here: Here) -> list[weakref.ref[Any]]:
    module = Module()
    trainer = here.trainer(max_steps=2)
    trainer.fit(module, Data(here))
    trainer.validate(module, Data(here), verbose=False)
    return [weakref.ref(each) for each in (module, trainer, trainer.strategy)]


def left(rank: int, world: int, mesh: Mesh) -> list[str]:
    # Workers of the pool have frozen what earlier calls left.
    gc.unfreeze()
    kept = fits(Here(mesh=mesh, rank=rank, directory=Path()))
    # Threads of gloo let the last tensors go a moment after they were sent.
    for _ in range(_LOOKS):
        gc.collect()
        names = [type(found).__name__ for found in (each() for each in kept) if found is not None]
        if not names:
            break
        time.sleep(_SECONDS)
    return names


@pytest.mark.spmd
@pytest.mark.parametrize("mesh", [DATA_0, DATA_3, TENSOR, RECOMPUTED, PIPELINE, ALL], ids=str)
def test_nothing_of_a_training_is_left(mesh: Mesh) -> None:
    assert run_spmd(left, mesh.world, mesh) == [[]] * mesh.world
