"""Checkpoints written in the background: those of their step, whole, and training does not wait for the disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_3d.checkpoint import store
from lightning_3d.errors import CheckpointError
from tests.features.modules import Module, Samples
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(240),
    # Lightning's notice that the callback that has saved is not there.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

MESHES = {
    "data 2, zero 3": (2, {"zero_stage": 3}),
    "pipeline 2": (2, {"pipeline_parallel_size": 2}),
    "tensor 2 x data 2": (4, {"tensor_parallel_size": 2, "zero_stage": 2}),
}
_SECONDS = 0.6


class Saves(Callback):
    """Saves in every step, at once and in the background, and measures how long that takes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        start = time.monotonic()
        trainer.save_checkpoint(self.directory / f"{trainer.global_step}.ckpt")
        self.seconds.append(time.monotonic() - start)


def fit(strategy: dict[str, Any], world: int, *callbacks: Callback, steps: int = 4) -> Trainer:
    L.seed_everything(5, verbose=False)
    # Without a callback that saves, Lightning would add one that saves into the working directory.
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    run = trainer(
        world, *callbacks, strategy=strategy, max_steps=steps, precision="64-true", enable_checkpointing=saves
    )
    size = 8 // run.strategy.data_size
    run.fit(Module(), DataLoader(Samples(48), size), DataLoader(Samples(8), 2))
    return run


def slowly(*args: Any) -> None:
    time.sleep(_SECONDS)
    _write(*args)


_write = store.write_tensors


def both(rank: int, world: int, strategy: dict[str, Any], directory: Path) -> list[float]:
    fit(strategy, world, Saves(directory / "at once"))
    store.write_tensors = slowly
    try:
        saves = Saves(directory / "later")
        fit({**strategy, "async_save": True}, world, saves)
    finally:
        store.write_tensors = _write
    return saves.seconds


def contents(rank: int, world: int, path: Path) -> dict[str, Any]:
    run = trainer(1, strategy={}, max_steps=10, precision="64-true")
    run.fit(Module(), DataLoader(Samples(48), 8), DataLoader(Samples(8), 2), ckpt_path=path)
    return {**run.strategy.full_state_dict(), "steps": torch.tensor(run.global_step)}


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_written_later_is_of_its_step(mesh: str, tmp_path: Path) -> None:
    world, strategy = MESHES[mesh]
    for seconds in run_spmd(both, world, strategy, tmp_path):
        # The first waits for nobody; each later one for the one before it alone.
        assert seconds[0] < _SECONDS
    for step in range(1, 5):
        found = [run_spmd(contents, 1, tmp_path / how / f"{step}.ckpt")[0] for how in ("at once", "later")]
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert sorted(path.name for path in (tmp_path / "later").iterdir()) == [f"{step}.ckpt" for step in range(1, 5)]


def fails(rank: int, world: int, directory: Path) -> str:
    def full(*args: Any) -> None:
        if calls := full.__dict__.setdefault("calls", []):
            raise OSError(28, "No space left on device")
        calls.append(1)
        _write(*args)

    store.write_tensors = full
    try:
        with pytest.raises(CheckpointError) as caught:
            fit({"zero_stage": 1, "async_save": True}, world, Saves(directory))
    finally:
        store.write_tensors = _write
    return str(caught.value)


def test_what_could_not_be_written_is_an_error_at_the_next_save(tmp_path: Path) -> None:
    for told in run_spmd(fails, 2, tmp_path):
        assert "could not write the checkpoint" in told
        assert "2.ckpt" in told
        assert "No space left on device" in told
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]
    run_spmd(contents, 1, tmp_path / "1.ckpt")


def keeps_one(rank: int, world: int, directory: Path) -> tuple[list[list[str]], float]:
    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: list[list[str]] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.seen.append(sorted(path.name for path in directory.glob("*.ckpt")))

    store.write_tensors = slowly
    looks, saver = Looks(), ModelCheckpoint(directory, "{step}", every_n_train_steps=1)
    try:
        run = fit({"zero_stage": 1, "async_save": True}, world, looks, saver)
        size = 8 // run.strategy.data_size
        run.test(Module(), DataLoader(Samples(8), size), ckpt_path="best", verbose=False)
    finally:
        store.write_tensors = _write
    return looks.seen, run.global_step


def test_the_last_good_one_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    for seen, _ in run_spmd(keeps_one, 2, tmp_path):
        assert all(len(names) >= 1 for names in seen[2:]), seen
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]


def writers_groups(rank: int, world: int, directory: Path) -> list[int]:
    class Counts(Saves):
        def on_train_end(self, *args: Any) -> None:
            found.append(count())

    def count() -> int:
        return sum(each.group_desc == "checkpoints" for each in dist.distributed_c10d._world.pg_map)

    found: list[int] = []
    fit({"async_save": True}, world, Counts(directory), steps=1)
    return [*found, count()]


def test_no_group_is_left_after_a_fit(tmp_path: Path) -> None:
    assert run_spmd(writers_groups, 2, tmp_path) == [[1, 0], [1, 0]]
