from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d.callbacks.checkpoint import EndCheckpoint


@pytest.mark.parametrize(("steps", "every"), [(6, 3), (5, 3), (2, 3)])
def test_the_last_checkpoint_is_the_last_step(steps: int, every: int, tmp_path: Path) -> None:
    saver = EndCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=every)
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver],
    )
    trainer.fit(BoringModel())
    assert saver.last_model_path == str(tmp_path / "last.ckpt")
    assert torch.load(saver.last_model_path, weights_only=False)["global_step"] == steps
