"""A user's own program without Hydra."""

import json
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import Mesh3DStrategy

trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=Mesh3DStrategy(),
    max_steps=int(sys.argv[1]),
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(BoringModel())
Path(f"rank{trainer.global_rank}.json").write_text(json.dumps([trainer.world_size, trainer.global_step]))
