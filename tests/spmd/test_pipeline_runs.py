"""A step in stages gives what it gives on one process, and so does code that runs on all stages together."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from tests.parity.catalog import build, global_batches
from tests.parity.pipeline_models import PIPELINE_MODELS
from tests.spmd.pool import run_spmd
from tests.spmd.stage_chain import check_parity

pytestmark = pytest.mark.spmd


def of_catalog(name: str) -> tuple[L.LightningModule, Any]:
    module = build(name).double().train()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module, global_batches(name, 1, 4, torch.float64)[0]


def parity(rank: int, world: int, name: str, options: dict[str, Any]) -> list[str]:
    # Some models compute in fp32 inside, whatever the precision.
    return check_parity(rank, world, partial(of_catalog, name), 1e-6 if "HF" in name else 1e-12, **options)


@pytest.mark.parametrize("name", PIPELINE_MODELS)
def test_step_in_two_stages_is_the_step_of_one_process(name: str) -> None:
    first, second = run_spmd(parity, 2, name, {})
    assert first == second
