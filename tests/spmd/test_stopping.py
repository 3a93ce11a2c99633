"""Exceptions and checkpoints: all ranks save together, or none does, and everyone ends with what went wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import SpmdError, run_spmd

pytestmark = [
    pytest.mark.spmd,
    # Lightning's advice to everyone who saves on exceptions.
    pytest.mark.filterwarnings(r"ignore:`?\.fit\(ckpt_path=:UserWarning"),
]

# Whoever fails waits a little for the others; then all are out.
_SECONDS = 15.0
MESHES = ({"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})


class Fails(Module):
    """Fails in its fourth step, on one rank or wherever it gets there."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and self.rank in (None, self.trainer.global_rank):
            raise ValueError("the fourth step")
        return super().training_step(batch, batch_idx)


def loader() -> Any:
    return DataLoader(Samples(32), batch_size=4)


def fails(rank: int, world: int, strategy: dict[str, Any], failing: int | None, directory: Path) -> None:
    savers = [
        OnExceptionCheckpoint(directory),
        ModelCheckpoint(directory / "more", save_on_exception=True, save_last="link", save_top_k=-1),
    ]
    run = trainer(world, *savers, strategy=strategy, max_epochs=1, precision="64-true", enable_checkpointing=True)
    run.fit(Fails(failing), loader(), loader())


def nothing(rank: int, world: int) -> None:
    """Has the processes started before the clock is."""


@pytest.mark.parametrize(
    ("strategy", "failing"), [more(MESHES[0], 1), more(MESHES[1], 1), (MESHES[2], 1), more(MESHES[2], None)], ids=str
)
def test_a_failure_that_not_all_ranks_see_is_told_at_once(
    strategy: dict[str, Any], failing: int | None, tmp_path: Path
) -> None:
    run_spmd(nothing, 2)
    start = time.monotonic()
    with pytest.raises(SpmdError) as caught:
        run_spmd(fails, 2, strategy, failing, tmp_path)
    assert time.monotonic() - start < _SECONDS
    first = next(iter(caught.value.reports.values()))
    assert "ValueError: the fourth step" in first
    assert "During handling" not in first
    assert len(caught.value.reports) == 2
    assert not [*tmp_path.rglob("*.ckpt")]


class StopsTogether(Module):
    """Fails on every rank before its fourth step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KeyError("all of us")


def not_set_up(rank: int, world: int, directory: Path) -> None:
    class Early(Module):
        def configure_model(self) -> None:
            raise ValueError("too early")

    trainer(world, OnExceptionCheckpoint(directory), max_epochs=1, enable_checkpointing=True).fit(
        Early(), loader(), loader()
    )


def test_a_failure_before_anything_could_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SpmdError) as caught:
        run_spmd(not_set_up, 2, tmp_path)
    for report in caught.value.reports.values():
        assert "ValueError: too early" in report
        assert "During handling" not in report


def saved_after_the_end(rank: int, world: int, directory: Path) -> str:
    run = trainer(world, max_epochs=1, precision="64-true")
    with pytest.raises(KeyError):
        run.fit(StopsTogether(), loader(), loader())
    with pytest.raises(RuntimeError) as caught:
        run.save_checkpoint(directory / "late.ckpt")
    return str(caught.value)


def test_after_the_end_nothing_can_be_saved(tmp_path: Path) -> None:
    for text in run_spmd(saved_after_the_end, 2, tmp_path):
        assert "the Trainer has ended with an exception" in text


def stops_and_saves(rank: int, world: int, directory: Path) -> None:
    run = trainer(
        world,
        OnExceptionCheckpoint(directory),
        strategy={"async_save": True, "zero_stage": 2},
        max_epochs=1,
        precision="64-true",
        enable_checkpointing=True,
    )
    with pytest.raises(KeyError):
        run.fit(StopsTogether(), loader(), loader())


def test_what_is_written_in_the_background_is_finished_before_ranks_part(tmp_path: Path) -> None:
    run_spmd(stops_and_saves, 2, tmp_path)
    (saved,) = tmp_path.iterdir()
    assert torch.load(saved / "meta.pt", weights_only=True)["global_step"] == 3


class Asked(Module):
    """Is asked to end in its second batch, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.handlers: list[str] = []

    def note(self, batch_idx: int) -> None:
        """Notes the batch, and who hears signals in it."""
        self.seen.append(batch_idx)
        self.handlers.append(getattr(signal.getsignal(signal.SIGTERM), "__module__", ""))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(batch_idx)
        if self.trainer.barebones:
            return
        if (batch_idx, self.trainer.global_rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note(batch_idx)
        return super().predict_step(batch, batch_idx)


def asked(rank: int, world: int, verb: str) -> list[int]:
    module, run = Asked(), trainer(world, precision="64-true")
    with pytest.raises(SIGTERMException):
        getattr(run, verb)(module, loader(), verbose=False)
    return module.seen


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_sigterm_on_one_rank_ends_an_evaluation_on_all_after_the_same_batch(verb: str) -> None:
    assert run_spmd(asked, 2, verb, timeout=20) == [[0, 1], [0, 1]]


def without_logs(rank: int, world: int) -> list[str]:
    predicts, validates = Asked(), Asked()
    trainer(world, precision="64-true").predict(predicts, loader())
    bare = L.Trainer(barebones=True, accelerator="cpu", devices=world, strategy=Mesh3DStrategy(), precision="64-true")
    bare.validate(validates, loader())
    assert min(len(predicts.seen), len(validates.seen)) > 0
    return predicts.handlers + validates.handlers


def test_lightning_hears_signals_where_ranks_have_no_logs_to_tell_them_with() -> None:
    # A handler of ours would swallow them.
    for handlers in run_spmd(without_logs, 2):
        assert all(each.startswith("lightning.") for each in handlers)
