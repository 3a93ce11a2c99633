"""What happens between the micro-batches of one optimizer step must not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.marks import more
from tests.parity.catalog import build, global_batches
from tests.parity.measure import whole
from tests.spmd.pool import run_spmd

MODEL, SAMPLES, BATCHES, RANKS = "HF GPT-2 (tied)", 4, 10, 2


class Interruptions(Callback):
    """Uses the model outside steps in the middle of accumulation windows: a call, and a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.directory / "inside")
        if batch_idx in (1, 3, 6):
            with torch.no_grad():
                pl_module.model.eval()
                pl_module.model(batch[0])
                pl_module.model.train()


def fit(rank: int, world: int, options: dict[str, Any], interrupted: bool, directory: Path) -> dict[str, Tensor]:
    module = build(MODEL)

    def validation_step(batch: Any, batch_idx: int) -> None:
        module.log("val_loss", module.loss(batch), sync_dist=True)

    module.validation_step = validation_step  # type: ignore[method-assign]
    share = SAMPLES // world
    batches = [(ids[rank * share : (rank + 1) * share],) for (ids,) in global_batches(MODEL, BATCHES, SAMPLES)]
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Mesh3DStrategy(**options),
        plugins=Mesh3DPrecision("64-true"),
        max_epochs=1,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        val_check_interval=3 if interrupted else None,
        limit_val_batches=2 if interrupted else 0,
        callbacks=[Interruptions(directory)] if interrupted else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    L.seed_everything(3, verbose=False)
    trainer.fit(module, loader, loader)
    return whole(dict(module.named_parameters()))


@pytest.mark.spmd
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, more(2), more(3)])
def test_validation_and_checkpoints_inside_a_window_change_nothing(
    zero_stage: int, microbatches: int, tmp_path: Path
) -> None:
    options = {"zero_stage": zero_stage, "num_microbatches": microbatches}
    found = run_spmd(fit, RANKS, options, True, tmp_path)[0]
    expected = run_spmd(fit, RANKS, options, False, tmp_path)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
