"""A program of which one rank comes to a bad end: ``python -m tests.spmd.faulty END RANK PLACE DIRECTORY STRATEGY``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.features.modules import Module, Samples

STEP = 3
# Seconds of a rank's patience where another one hangs; to start all of them takes as long on a busy machine.
TIMEOUT = 30


class Faulty(Module):
    """Ends on one rank.

    Args:
        end: How.
        rank: Where.
        place: In which method.
        directory: Each rank leaves its process id there, and the last one the time.
    """

    def __init__(self, end: str, rank: int, place: str, directory: Path) -> None:
        super().__init__()
        self.end, self.rank, self.place, self.directory = end, rank, place, directory

    def meet(self, place: str) -> None:
        """Ends here if it is here."""
        step = STEP if place == "load" else self.trainer.global_step
        if (place, self.rank, STEP) != (self.place, self.trainer.global_rank, step):
            return
        # As long as a step of a model takes, and longer than it takes to tell where a rank is.
        time.sleep(0.5)
        (self.directory / "time").write_text(str(time.time()))
        if self.end in ("raise", "raise and save"):
            raise ValueError("this rank fails on purpose")
        if self.end == "memory":
            raise torch.OutOfMemoryError("no memory on purpose")
        if self.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end == "leave":
            os._exit(0)
        if self.end in ("ask", "ask alone"):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(1000)

    def setup(self, stage: str) -> None:
        (self.directory / f"rank-{self.trainer.global_rank}").write_text(str(os.getpid()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.meet("step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.meet("hook")
        if self.place == "alone" and self.trainer.global_step == STEP and self.trainer.global_rank != self.rank:
            # The others wait for nobody, and would not notice.
            time.sleep(1000)
        self.meet("alone")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.meet("save")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.meet("load")


def main(end: str, rank: str, place: str, directory: str, strategy: str) -> None:
    """Trains on four ranks."""
    saved = Path(directory) / "saved"
    callbacks: list[L.Callback] = []
    if end == "ask":
        callbacks = [OnExceptionCheckpoint(saved)]
    elif end == "raise and save":
        callbacks = [ModelCheckpoint(saved, save_on_exception=True, save_top_k=0)]
    elif place == "save" or end == "ask alone":
        # Long before it would save by itself, a signal comes.
        every = 100 if end == "ask alone" else STEP
        callbacks = [ModelCheckpoint(saved, every_n_train_steps=every, filename="{step}")]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=Mesh3DStrategy(timeout_seconds=TIMEOUT if end == "hang" else 300, **json.loads(strategy)),
        precision="64-true",
        max_epochs=3,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    loader = DataLoader(Samples(64), batch_size=4)
    checkpoint = next(iter(Path(directory).glob("before/*.ckpt")), None)
    module = Faulty(end, int(rank), place, Path(directory))
    trainer.fit(module, loader, DataLoader(Samples(16), batch_size=4), ckpt_path=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
