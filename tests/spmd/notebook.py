"""What somebody types into cells of a notebook: ``python -m tests.spmd.notebook START_METHOD``, "auto" as if in one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "auto":
    # Python has a prompt: what Lightning knows a notebook by, when it is imported.
    sys.ps1 = "In [1]: "  # type: ignore[attr-defined]

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.features.modules import Classifies, Module, Samples


class Late(Module):
    """Makes its model when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Classifies()


def seen(module: Module, strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    """Fits and tests, and returns what is in this process then."""
    best = ModelCheckpoint(dirpath=tempfile.mkdtemp(), monitor="val_loss")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert not torch.distributed.is_initialized()
    trainer.fit(module, DataLoader(Samples(16), batch_size), DataLoader(Samples(8), batch_size))
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert os.path.exists(best.best_model_path)
    (tested,) = trainer.test(module, DataLoader(Samples(8), batch_size), ckpt_path="best", verbose=False)
    return {
        "metrics": fitted,
        "state": str(trainer.state.status),
        "tested": tested,
        "weights": {name: tensor.flatten().tolist() for name, tensor in module.state_dict().items()},
    }


def main(method: str) -> None:
    """Prints what two processes and one have seen."""
    strategy = Mesh3DStrategy(start_method=method, tensor_parallel_size=2)
    L.seed_everything(1, verbose=False)
    module = Module().double()
    one = seen(module, "auto", 1, 8)
    L.seed_everything(1, verbose=False)
    print(json.dumps([one, seen(Module().double(), strategy, 2, 8)]))
    if method != "spawn":
        strategy = Mesh3DStrategy(start_method=method, zero_stage=3)
        print(json.dumps(seen(Late(), strategy, 2, 4)["weights"]))


if __name__ == "__main__":
    main(sys.argv[1])
