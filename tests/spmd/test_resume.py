"""A training that is stopped and resumed equals one that is not, to the bit: weights, optimizer, schedule, noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.marks import more
from tests.parity.catalog import build, global_batches
from tests.parity.measure import whole
from tests.parity.models import NextToken
from tests.spmd.fits import QUIET, loader, share
from tests.spmd.pool import run_spmd

MODEL, SAMPLES, BATCHES = "HF GPT-2 (tied)", 4, 4


class Scheduled(NextToken):
    """Dropout in the model, noise of its own, a schedule per step, a loss in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss * (1 + 0.01 * torch.rand(()).item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=3 * BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(
    rank: int, world: int, options: dict[str, Any], precision: str, epochs: int, directory: Path, resume: str | None
) -> tuple[dict[str, Tensor], dict[str, float], str, list[str]]:
    """Trains for some epochs; returns whole parameters, logged values, and the best and all checkpoints' names."""
    L.seed_everything(3, verbose=False)
    saver = ModelCheckpoint(directory, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    module = Scheduled(build(MODEL).model)
    data = [share(batch, rank, world) for batch in global_batches(MODEL, BATCHES, SAMPLES)]
    trainer = L.Trainer(
        **(QUIET | {"enable_checkpointing": True}),
        devices=world,
        strategy=Mesh3DStrategy(**options),
        plugins=Mesh3DPrecision(precision),
        max_epochs=epochs,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[saver],
    )
    trainer.fit(module, loader(data), loader(data[:2]), ckpt_path=resume)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    kept = sorted(path.name for path in directory.iterdir())
    return whole(dict(module.named_parameters())), logged, Path(saver.best_model_path).name, kept


@pytest.mark.spmd
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        more({"zero_stage": 0}, "32-true"),
        more({"zero_stage": 1, "num_microbatches": 2}, "16-mixed"),
        ({"zero_stage": 3}, "bf16-master"),
        more({"zero_stage": 2, "save_distributed_checkpoint": False}, "bf16-mixed"),
    ],
    ids=str,
)
def test_resumed_equals_uninterrupted(options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    expected = run_spmd(fit, 2, options, precision, 3, unbroken, None)
    run_spmd(fit, 2, options, precision, 1, broken, None)
    resumed = run_spmd(fit, 2, options, precision, 3, broken, str(broken / "last.ckpt"))
    for rank in range(2):
        parameters, logged, best, kept = resumed[rank]
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected[rank][0].items())
        assert logged == expected[rank][1]
        assert (best, kept) == expected[0][2:]
        assert len(kept) == len({"last.ckpt", "the best", "the second best"})
