import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d.callbacks.throughput import Throughput


class _Module(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss


@pytest.mark.parametrize(("tokens", "unit"), [(None, "samples"), (8, "tokens")])
def test_prints_every_few_steps(
    tokens: int | None, unit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Throughput(every_n_steps=2, tokens_per_sample=tokens)
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=6,
        limit_val_batches=1,
        val_check_interval=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    with caplog.at_level(logging.INFO, logger="lightning_3d.callbacks.throughput"):
        trainer.fit(_Module())
    lines = [record.message for record in caplog.records if record.name.endswith("throughput")]
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4", "step 6", "trained to step 6"]
    assert all(line.endswith(f" {unit}/s") and "  loss " in line for line in lines)
    assert callback.per_second > 0
