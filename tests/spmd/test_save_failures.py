"""Saves that fail: one error on all ranks, the checkpoint before stays, and training goes on as if nothing had been."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

from lightning_3d.checkpoint.restore import open_checkpoint
from lightning_3d.errors import CheckpointError
from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

STEPS = 6
_NOBODY = 65534


@contextmanager
def full(rank: int, directory: Path) -> Iterator[None]:
    """Rank 1 can write a few bytes into a file, and then no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def forbidden(rank: int, directory: Path) -> Iterator[None]:
    """Nobody may write into the directory."""
    was_root = os.geteuid() == 0
    directory.chmod(0o500)
    if was_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
        directory.chmod(0o700)


@contextmanager
def vanishing(rank: int, directory: Path) -> Iterator[None]:
    """The folder that is being written disappears."""
    write = FileSystemWriter.write_data

    def without_folder(self: FileSystemWriter, *args: Any) -> Any:
        shutil.rmtree(self.path, ignore_errors=True)
        return write(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", without_folder)
        yield


class Tries(Callback):
    """Saves after the first step, in trouble after the second, and in each step from then on.

    Args:
        directory: Where to.
        trouble: What is wrong until a save has failed.
        rank: This rank.
    """

    def __init__(self, directory: Path, trouble: Any, rank: int) -> None:
        self.path, self.trouble = directory / "last.ckpt", trouble(rank, directory)
        self.errors: list[str] = []
        self.kept: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            # The first one is whole by then.
            writing = trainer.strategy._on_mesh.checkpoints._background  # type: ignore[attr-defined]
            if writing is not None:
                writing.wait()
            self.trouble.__enter__()
        try:
            trainer.save_checkpoint(self.path)
        except CheckpointError as error:
            self.errors.append(str(error))
            self.trouble.__exit__(None, None, None)
            self.kept.append(open_checkpoint(self.path, weights_only=True, group=None).metadata["global_step"])


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))


def fit(
    rank: int, world: int, strategy: dict[str, Any], directory: Path, how: str | None, resume: Path | None = None
) -> tuple[list[float], dict[str, Tensor], list[str], list[int]]:
    L.seed_everything(5, verbose=False)
    losses, tries = Losses(), None if how is None else Tries(directory, TROUBLES[how], rank)
    callbacks: list[Callback] = [losses] if tries is None else [losses, tries]
    run = trainer(world, *callbacks, strategy=strategy, max_steps=STEPS, precision="64-true", limit_val_batches=0)
    size = 8 // run.strategy.data_size
    run.fit(Module(), DataLoader(Samples(64), size), DataLoader(Samples(8), 2), ckpt_path=resume)
    whole = {name: value.clone() for name, value in run.strategy.full_state_dict().items()}
    return losses.losses, whole, [] if tries is None else tries.errors, [] if tries is None else tries.kept


TROUBLES = {"full": full, "forbidden": forbidden, "vanishing": vanishing}
TEXTS = {"full": "File too large", "forbidden": "Permission denied", "vanishing": "No such file or directory"}


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("full", {"zero_stage": 1}),
        more("full", {"zero_stage": 1, "async_save": True}),
        ("forbidden", {"pipeline_parallel_size": 2}),
        more("forbidden", {"tensor_parallel_size": 2, "async_save": True}),
        more("vanishing", {"zero_stage": 3}),
        ("vanishing", {"zero_stage": 3, "async_save": True}),
    ],
    ids=str,
)
def test_training_goes_on_after_a_save_that_failed(how: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    quiet = run_spmd(fit, 2, strategy, tmp_path, None)
    (tmp_path / "kept").mkdir()
    found = run_spmd(fit, 2, strategy, tmp_path / "kept", how)
    assert found[0][2] == found[1][2]
    for (losses, weights, _, _), (mine, whole, errors, kept) in zip(quiet, found, strict=True):
        assert len(errors) == 1
        assert f"{tmp_path / 'kept'}" in errors[0]
        assert TEXTS[how] in errors[0]
        # What was saved before the trouble is what loads after it.
        assert kept == [1]
        assert mine == losses
        assert all(torch.equal(whole[name], value) for name, value in weights.items())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["last.ckpt"]
    _, whole, _, _ = run_spmd(fit, 1, {}, tmp_path, None, tmp_path / "kept" / "last.ckpt")[0]
    assert all(torch.equal(whole[name], value) for name, value in found[0][1].items())
