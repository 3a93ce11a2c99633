"""Folders behind URLs, written by several ranks: at once and in the background, kept and removed, on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


def fit(
    rank: int, world: int, strategy: dict[str, Any], steps: int, url: str | None, resume: str | None
) -> dict[str, Tensor]:
    L.seed_everything(5, verbose=False)
    saver = [] if url is None else [ModelCheckpoint(url, "{step}", every_n_train_steps=1, save_last=True)]
    run = trainer(
        world,
        *saver,
        strategy=strategy,
        max_steps=steps,
        precision="64-true",
        limit_val_batches=0,
        enable_checkpointing=url is not None,
    )
    size = 8 // run.strategy.data_size
    run.fit(Module(), DataLoader(Samples(64), size), DataLoader(Samples(8), 2), ckpt_path=resume)
    return {name: value.clone() for name, value in run.strategy.full_state_dict().items()}


@pytest.mark.parametrize("later", [more(False), True], ids=["at once", "in the background"])
def test_goes_on_from_a_url(later: bool, tmp_path: Path) -> None:
    (whole,) = run_spmd(fit, 1, {}, 6, None, None)
    url = f"local://{tmp_path}/kept"
    run_spmd(fit, 2, {"zero_stage": 3, "async_save": later}, 3, url, None)
    # Of those that were saved in each step, the last is left, under both names.
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["last.ckpt", "step=3.ckpt"]
    for path in (tmp_path / "kept").iterdir():
        assert len([*path.iterdir()]) == 2
    for found in run_spmd(fit, 2, {"tensor_parallel_size": 2}, 6, None, f"{url}/last.ckpt"):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
