"""A user's own callback, found because the command is given in this directory."""

import json
import os
import signal
from pathlib import Path

import lightning as L


class Recorder(L.Callback):
    """Leaves what each rank saw, one file per rank, in the directory of the job."""

    def __init__(self, fail_on: int | None = None, dies: int | None = None) -> None:
        self.fail_on, self.dies = fail_on, dies

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == self.fail_on:
            raise RuntimeError(f"rank {self.fail_on} fails on purpose")

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        died = Path(trainer.default_root_dir, "died")
        if trainer.global_rank == self.dies and trainer.global_step == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen = {
            "world": trainer.world_size,
            "directory": str(Path.cwd()),
            "loss": float(trainer.callback_metrics["test_loss"]),
            "plan": trainer.strategy.config.tensor_plan,
            "zero_stage": trainer.strategy.config.zero_stage,
            "step": trainer.global_step,
        }
        Path(trainer.default_root_dir, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))
