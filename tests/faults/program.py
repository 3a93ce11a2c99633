"""The job whose ranks are killed: it trains, saves every second step, and writes down what it is doing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from lightning_3d.strategy.launch.launcher import single_job
from tests.features.modules import Module, Samples

STEP, SAVE, LOAD = "step", "save", "load"
FOLDER = "checkpoints"
DIGESTS = "digests.json"
EVERY = 2
_SAMPLES, _BATCH = 512, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank of a job is told.

    Attributes:
        world: Number of ranks.
        strategy: Options of the strategy.
        directory: Where the job writes.
        port: Where its ranks meet.
        steps: Steps of training.
        nodes: Directories that stand for the disks of as many nodes.
        resume: Checkpoint to go on from, seen from the directory of a node.
        recorded: Whether the state after every step is digested, into `DIGESTS`.
    """

    world: int
    strategy: Mapping[str, Any]
    directory: Path
    port: int
    steps: int
    nodes: int = 1
    resume: str | None = None
    recorded: bool = False

    def node(self, rank: int) -> Path:
        """Returns the directory that the node of a rank has for itself."""
        return self.directory / f"node-{rank * self.nodes // self.world}"

    def marks(self, rank: int) -> Path:
        """Returns where a rank writes what it does."""
        return self.directory / f"rank-{rank}.marks"

    def output(self, rank: int) -> Path:
        """Returns where a rank writes what it says."""
        return self.directory / f"rank-{rank}.txt"


class Marked(Mesh3DStrategy):
    """Writes down when this rank begins and ends to save and to load."""

    marks: Path

    @contextmanager
    def doing(self, what: str, of: str) -> Iterator[None]:
        for end in (False, True):
            with self.marks.open("a") as file:
                file.write(json.dumps({"what": what, "of": of, "end": end, "at": time.time()}) + "\n")
            if not end:
                yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with self.doing(SAVE, Path(filepath).name):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with self.doing(LOAD, Path(checkpoint_path).name):
            return super().load_checkpoint(checkpoint_path, weights_only)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.doing(STEP, str(self.lightning_module.global_step)):
            return super().training_step(*args, **kwargs)


class Saves(Callback):
    """Saves under a name of its own every few steps, and each time again under one name.

    The names are relative, so that each node has them on its own disk.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step % EVERY == 0:
            trainer.save_checkpoint(f"{FOLDER}/step={trainer.global_step}.ckpt")
            trainer.save_checkpoint(f"{FOLDER}/last.ckpt")


class Digests(Callback):
    """Notes a digest of weights and optimizer when training begins and after every step."""

    def __init__(self) -> None:
        self.of_step: dict[int, str] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step:
            self.of_step[trainer.global_step] = digest(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.of_step[trainer.global_step] = digest(trainer)


def digest(trainer: L.Trainer) -> str:
    """Returns a digest of the whole weights and of the whole optimizer state; every rank must call it."""
    strategy = trainer.strategy
    assert isinstance(strategy, Mesh3DStrategy)
    found = {f"weight {name}": tensor for name, tensor in strategy.full_state_dict().items()}
    (optimizer,) = trainer.optimizers
    states = {name: optimizer.state.get(each, {}) for name, each in trainer.lightning_module.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        held = strategy.full_tensors({name: state.get(key) for name, state in states.items()})
        found |= {f"{key} {name}": tensor for name, tensor in held.items()}
    summary = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        summary.update(f"{name} {tuple(found[name].shape)}".encode() + _values(found[name]))
    return summary.hexdigest()


def _values(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def trainer_of(strategy: Mesh3DStrategy, world: int, steps: int, *callbacks: Callback) -> L.Trainer:
    """Returns a Trainer that writes nothing of its own."""
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def loaders(data_size: int) -> DataLoader[Any]:
    """Returns the loader of a data rank: global batches are the same on every mesh."""
    return DataLoader(Samples(_SAMPLES), batch_size=_BATCH // data_size, shuffle=True)


def run_rank(rank: int, job: Job) -> None:
    """Trains as one rank of a job, in a process of its own."""
    # Whatever it starts ends with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    warnings.simplefilter("ignore")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "WORLD_SIZE": str(job.world),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }
    job.node(rank).mkdir(parents=True, exist_ok=True)
    os.chdir(job.node(rank))
    L.seed_everything(1, verbose=False)
    strategy = Marked(**job.strategy)
    strategy.marks = job.marks(rank)
    digests = Digests()
    trainer = trainer_of(strategy, job.world, job.steps, Saves(), *([digests] if job.recorded else []))
    trainer.fit(Module(), loaders(strategy.data_size), ckpt_path=job.resume)
    if rank == 0 and job.recorded:
        (job.directory / DIGESTS).write_text(json.dumps(digests.of_step))


def load(checkpoint: Path) -> tuple[int, str]:
    """Loads a checkpoint on one device and takes the next step; returns its step and what it holds."""
    digests = Digests()
    step = int(torch.load(checkpoint / "meta.pt", weights_only=True)["global_step"])
    with single_job():
        trainer = trainer_of(Mesh3DStrategy(), 1, step + 1, digests)
        trainer.fit(Module(), loaders(1), ckpt_path=str(checkpoint))
    assert trainer.global_step == step + 1
    return step, digests.of_step[step]
