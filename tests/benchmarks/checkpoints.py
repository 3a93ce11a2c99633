"""What a save takes beside torch.save and plain DCP: `python -m tests.benchmarks.checkpoints`.

Two processes train a GPT with AdamW and ZeRO 3; after a step they save it in each of four ways, in turn, several times:
`torch.save` of what rank 0 has gathered, `torch.distributed.checkpoint.save` alone, ours, and ours in the background.
Ours is what Lightning calls: it collects the state, writes under a temporary name, flushes it to the disk and renames;
the other two get the same flush. Prints a Markdown table of medians on the slowest rank; asserts nothing about time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from lightning_3d.checkpoint.background import BackgroundWriter
from lightning_3d.checkpoint.generators import random_state
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.reference.gpt import GPT
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

VOCABULARY, LENGTH, WIDTH, LAYERS = 4096, 32, 384, 8
WORLD = 2
Way = Callable[[Trainer, Path], float]


class Model(L.LightningModule):
    """A small GPT in a plain LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=LAYERS, num_heads=6, max_length=LENGTH)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def states(run: Trainer, *, whole: bool) -> dict[str, Any]:
    """Returns weights and optimizer state as torch's own functions collect them."""
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    model, optimizer = get_state_dict(run.lightning_module, run.optimizers, options=options)
    return {"model": model, "optimizer": optimizer}


def by_torch(run: Trainer, path: Path) -> float:
    """Gathers everything on rank 0, which writes one file."""
    content = states(run, whole=True)
    if dist.get_rank() == 0:
        torch.save(content, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    dist.barrier()
    return 0.0


def by_dcp(run: Trainer, path: Path) -> float:
    """Every rank writes its shards."""
    dcp.save(states(run, whole=False), storage_writer=FileSystemWriter(path, sync_files=True))
    return 0.0


def ours(run: Trainer, path: Path, background: BackgroundWriter | None = None) -> None:
    """What `trainer.save_checkpoint` does."""
    checkpoint = run._checkpoint_connector.dump_checkpoint(weights_only=False)
    state = CheckpointState.of(checkpoint, random_state(torch.device("cpu")))
    save(path, state, distributed=True, group=dist.group.WORLD, background=background)


def at_once(run: Trainer, path: Path) -> float:
    """Ours."""
    ours(run, path)
    return 0.0


class Later:
    """Ours, in the background."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self._writer = BackgroundWriter(dist.group.WORLD, timedelta(seconds=60))

    def __call__(self, run: Trainer, path: Path) -> float:
        """Returns the seconds after which training would go on."""
        start = time.perf_counter()
        ours(run, path, self._writer)
        blocked = time.perf_counter() - start
        self._writer.wait()
        return blocked


class Saves(Callback):
    """Saves in every way, in turn.

    Args:
        directory: Where to.
        rounds: How often.
    """

    def __init__(self, directory: Path, rounds: int) -> None:
        self.directory, self.rounds = directory, rounds
        self.seconds: dict[str, list[float]] = {}
        self.blocked: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        ways: dict[str, Way] = {
            "torch.save on rank 0": by_torch,
            "torch.distributed.checkpoint": by_dcp,
            "ours": at_once,
            "ours, async": Later(),
        }
        # The first round warms up.
        for number in range(self.rounds + 1):
            for name, way in ways.items():
                path = self.directory / f"{name.replace(' ', '-')}-{number}.ckpt"
                dist.barrier()
                start = time.perf_counter()
                blocked = way(trainer, path)
                took = time.perf_counter() - start
                dist.barrier()
                if number:
                    self.seconds.setdefault(name, []).append(took)
                    self.blocked.setdefault(name, []).append(blocked or took)
                self.bytes[name] = size_of(path)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def measure(rank: int, world: int, directory: Path, rounds: int) -> tuple[dict[str, Any], ...]:
    """Trains one step and saves."""
    saves = Saves(directory, rounds)
    run = trainer(world, saves, strategy=Mesh3DStrategy(zero_stage=3), max_steps=1)
    run.fit(Model(), DataLoader(torch.randint(0, VOCABULARY, (8, LENGTH)), 2))
    return saves.seconds, saves.blocked, saves.bytes


def main(arguments: Iterable[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(list(arguments)).rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ranks = run_spmd(measure, WORLD, Path(folder), rounds, timeout=600)
    count = sum(parameter.numel() for parameter in Model().parameters())
    print(f"\n**{count / 1e6:.1f} million parameters, AdamW, fp32, {WORLD} ranks, ZeRO 3, {rounds} saves each**\n")
    print("| save | seconds | x torch.save | training waits, s | MB |")
    print("|---|---|---|---|---|")
    base = statistics.median(
        max(times) for times in zip(*(rank[0][next(iter(rank[0]))] for rank in ranks), strict=True)
    )
    for name in ranks[0][0]:
        took, blocked = (
            statistics.median(max(times) for times in zip(*(rank[kind][name] for rank in ranks), strict=True))
            for kind in (0, 1)
        )
        print(f"| {name} | {took:.2f} | {took / base:.2f} | {blocked:.3f} | {ranks[0][2][name] / 1e6:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
