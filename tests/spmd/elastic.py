"""A plain script for torchrun, of which a rank or a node dies: its words are STEPS DIRECTORY DIES STRATEGY.

``DIES`` is "rank:RANK:STEP", where that rank kills itself once, "save:RANK:STEP", where it does so while all save into
the directories in which their agents were started, or "node:NODE:STEP", where a node goes away: its agent and all its
ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.faults.program import Saves
from tests.features.modules import Module, Samples

BATCH = 8


class Counted(Module):
    """Writes its losses down, as all data ranks together have them, and dies where it is told to."""

    def __init__(self, directory: Path, dies: str) -> None:
        super().__init__()
        self.directory, self.dies = directory, dies

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = [round(100 * float(value)) for value in batch[0][:, 0]]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        loss = float(self.trainer.callback_metrics["train_loss_step"])
        line = {"step": self.trainer.global_step, "loss": loss, "seen": self.seen, "world": self.trainer.world_size}
        with (self.directory / f"rank-{self.trainer.global_rank}.steps").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.dies == f"save:{self.trainer.global_rank}:{self.trainer.global_step}":
            died = self.directory / "died"
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        kind, _, where = self.dies.partition(":")
        number, _, step = where.partition(":")
        if not kind or self.trainer.global_step != int(step) or (self.directory / "died").exists():
            return
        if kind == "rank" and self.trainer.global_rank == int(number):
            (self.directory / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "node" and os.environ["GROUP_RANK"] == number and os.environ["LOCAL_RANK"] == "0":
            (self.directory / "died").touch()
            agent = os.getppid()
            for process in (*(other for other in children(agent) if other != os.getpid()), agent, os.getpid()):
                os.kill(process, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """Returns the processes that a process has started and that run still."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        # Others end while this looks at them.
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def main(steps: str, directory: str, dies: str = "", **strategy: Any) -> None:
    """Trains on what torchrun has started."""
    warnings.simplefilter("ignore")
    place = Path(directory)
    L.seed_everything(1, verbose=False)
    plugin = Mesh3DStrategy(**strategy)
    saves: L.Callback = ModelCheckpoint(place / "saved", save_top_k=-1, every_n_train_steps=2, filename="{step}")
    if dies.startswith("save"):
        saves = Saves()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=plugin,
        precision="64-true",
        max_steps=int(steps),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=isinstance(saves, ModelCheckpoint),
        callbacks=[saves],
    )
    loader = DataLoader(Samples(96), batch_size=BATCH // plugin.data_size, shuffle=True)
    trainer.fit(Counted(place, dies), loader)


if __name__ == "__main__":
    main(*sys.argv[1:4], **json.loads(sys.argv[4]))
