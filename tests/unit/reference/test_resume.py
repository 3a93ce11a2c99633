"""Interrupted and resumed runs read what an uninterrupted one reads, and end with the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_3d.reference import GPT, LanguageModel, TextDataModule, warmup_cosine
from tests.unit.reference.conftest import DataFactory

# 43 training windows, hence 6 batches of 8 in an epoch.
EPOCH = 6


class Recorder(LanguageModel):
    """Remembers the samples of each training step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            model=functools.partial(GPT, 257, hidden_size=8, num_layers=1, num_heads=2, max_length=63),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            **options,
        )
        self.seen: list[list[str]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:  # type: ignore[override]
        self.seen.append([bytes(row.byte()).decode() for row in batch])
        return super().training_step(batch, batch_idx)


class SaveAt(Callback):
    """Saves a checkpoint in one hook, the first time that a number of optimizer steps has been made."""

    def __init__(self, hook: str, step: int, path: Path) -> None:
        self.step, self.path = step, path
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fit(
    data: TextDataModule, *, ckpt: Path | None = None, scheduled: bool = False, **options: Any
) -> tuple[L.Trainer, Recorder]:
    torch.manual_seed(0)
    scheduler = functools.partial(warmup_cosine, warmup_steps=5) if scheduled else None
    module = Recorder(scheduler=scheduler)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return trainer, module


def assert_same_end(resumed: Recorder, whole: Recorder, steps_before: int) -> None:
    assert len(resumed.seen) == len(whole.seen) - steps_before
    assert resumed.seen == whole.seen[steps_before:]
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


MOMENTS = [
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", EPOCH - 1),
    ("on_train_batch_end", EPOCH),
    ("on_train_batch_end", EPOCH + 3),
    ("on_train_batch_start", 2),
    ("on_train_batch_start", EPOCH),
    ("on_validation_end", 2),
    ("on_validation_end", EPOCH),
    ("on_train_epoch_end", EPOCH),
    ("on_train_epoch_end", 2 * EPOCH),
]
LENGTHS: dict[str, dict[str, Any]] = {"steps": {"max_steps": 2 * EPOCH + 3}, "epochs": {"max_epochs": 3}}
Whole = dict[str, tuple[Recorder, Path]]


@pytest.fixture(scope="module")
def whole_runs(make_data: DataFactory, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An uninterrupted run of each length, with a checkpoint of every moment."""
    runs = {}
    for name, length in LENGTHS.items():
        folder = tmp_path_factory.mktemp(name)
        savers: list[Callback] = [SaveAt(hook, step, folder / f"{hook}-{step}.ckpt") for hook, step in MOMENTS]
        _, module = fit(make_data(), callbacks=savers, val_check_interval=2, scheduled=True, **length)
        runs[name] = (module, folder)
    return runs


@pytest.mark.parametrize(("hook", "step"), MOMENTS)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_checkpoint_from_anywhere(make_data: DataFactory, whole_runs: Whole, name: str, hook: str, step: int) -> None:
    whole, folder = whole_runs[name]
    ckpt = folder / f"{hook}-{step}.ckpt"
    _, resumed = fit(make_data(), ckpt=ckpt, val_check_interval=2, scheduled=True, **LENGTHS[name])
    assert_same_end(resumed, whole, step)


@pytest.mark.parametrize(
    "stops", [(4,), (2, 4, EPOCH + 1), (EPOCH,), (3, EPOCH + 3, 2 * EPOCH), (EPOCH - 1, 2 * EPOCH + 1)]
)
def test_runs_that_stop_at_a_step_and_go_on_again_and_again(
    make_data: DataFactory, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    _, whole = fit(make_data(), max_steps=20)
    path = None
    for stop in stops:
        trainer, _ = fit(make_data(), ckpt=path, max_steps=stop)
        path = tmp_path / f"{stop}.ckpt"
        trainer.save_checkpoint(path)
    _, resumed = fit(make_data(), ckpt=path, max_steps=20)
    assert_same_end(resumed, whole, stops[-1])


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
def test_a_stop_in_mid_epoch_saved_in_each_hook(make_data: DataFactory, tmp_path: Path, hook: str) -> None:
    path = tmp_path / "saved.ckpt"
    _, whole = fit(make_data(), max_steps=15)
    fit(make_data(), max_steps=4, callbacks=[SaveAt(hook, 4, path)])
    _, resumed = fit(make_data(), ckpt=path, max_steps=15)
    assert_same_end(resumed, whole, 4)


@pytest.mark.parametrize("options", [{"limit_train_batches": 4}, {"limit_train_batches": 4, "val_check_interval": 0.5}])
def test_epochs_that_the_trainer_cuts_short(make_data: DataFactory, tmp_path: Path, options: dict[str, Any]) -> None:
    paths = {step: tmp_path / f"{step}.ckpt" for step in (2, 4, 7)}
    savers: list[Callback] = [SaveAt("on_train_batch_end", step, path) for step, path in paths.items()]
    _, whole = fit(make_data(), max_epochs=3, callbacks=savers, **options)
    for step, path in paths.items():
        _, resumed = fit(make_data(), ckpt=path, max_epochs=3, **options)
        assert_same_end(resumed, whole, step)


def test_accumulation(make_data: DataFactory, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    options = {"max_steps": 5, "accumulate_grad_batches": 4}
    _, whole = fit(make_data(), callbacks=[SaveAt("on_train_batch_start", 3, path)], **options)
    _, resumed = fit(make_data(), ckpt=path, **options)
    assert_same_end(resumed, whole, EPOCH + 4)


@pytest.mark.parametrize("step", [4, EPOCH])
def test_batches_that_workers_read_ahead_are_not_lost(make_data: DataFactory, tmp_path: Path, step: int) -> None:
    path = tmp_path / "saved.ckpt"
    options: dict[str, Any] = {"max_epochs": 2, "scheduled": True}
    _, whole = fit(make_data(), callbacks=[SaveAt("on_train_batch_end", step, path)], **options)
    _, resumed = fit(make_data(num_workers=1), ckpt=path, **options)
    assert_same_end(resumed, whole, step)


def test_the_seed_of_the_checkpoint_orders_the_rest(make_data: DataFactory, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    _, whole = fit(make_data(seed=1), max_steps=10, callbacks=[SaveAt("on_train_batch_end", 4, path)])
    _, resumed = fit(make_data(seed=2), ckpt=path, max_steps=10)
    assert_same_end(resumed, whole, 4)


def test_the_state_is_plain_and_counts_finished_samples(make_data: DataFactory, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(make_data(), max_steps=10, callbacks=[SaveAt("on_train_batch_end", EPOCH + 3, path)])
    saved = torch.load(path, weights_only=True)
    assert saved["TextDataModule"] == {"format": 1, "seed": 0, "epoch": 1, "samples": 24, "epoch_samples": 43}
    assert saved["datamodule_hyper_parameters"]["length"] == 63
    assert saved["hyper_parameters"]["ignore_index"] == -100


def on_data_rank(data: TextDataModule, rank: int, replicas: int, batches_done: int) -> TextDataModule:
    """Gives a data module what it asks of a Trainer that runs on several data ranks."""
    current = L.Trainer(logger=False, accelerator="cpu").fit_loop.epoch_loop.batch_progress.current
    current.ready = current.processed = batches_done
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=current)))
    kwargs = {"num_replicas": replicas, "rank": rank}
    data.trainer = SimpleNamespace(fit_loop=loop, distributed_sampler_kwargs=kwargs)  # type: ignore[assignment]
    data.setup("fit")
    return data


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_another_data_degree_goes_on_with_the_same_samples(
    make_data: DataFactory, tmp_path: Path, replicas: int
) -> None:
    path = tmp_path / "saved.ckpt"
    _, whole = fit(make_data(), max_steps=EPOCH, callbacks=[SaveAt("on_train_batch_end", 4, path)])
    state = torch.load(path, weights_only=True)["TextDataModule"]
    ranks = []
    for rank in range(replicas):
        data = on_data_rank(make_data(batch_size=8 // replicas), rank, replicas, 4)
        data.load_state_dict(state)
        loader = data.train_dataloader()
        assert len(loader) == EPOCH
        ranks.append(list(loader))
        assert data.state_dict() == state
    joined = [torch.cat(batches) for batches in zip(*ranks, strict=True)]
    assert [[bytes(row.byte()).decode() for row in batch] for batch in joined] == whole.seen[4:]


def test_another_global_batch_in_mid_epoch_is_refused(make_data: DataFactory, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(make_data(), max_steps=10, callbacks=[SaveAt("on_train_batch_end", 4, path)])
    with pytest.raises(ValueError, match="stands after 32 samples of an epoch, and the batches done are 16 samples"):
        fit(make_data(batch_size=4), ckpt=path, max_steps=10)
    with pytest.raises(ValueError, match="an epoch of 43 samples, and this text has 42"):
        fit(make_data(val_fraction=0.1), ckpt=path, max_steps=10)


def test_a_state_of_another_format_is_refused(make_data: DataFactory) -> None:
    with pytest.raises(ValueError, match="position has format 2\n  valid: 1"):
        make_data().load_state_dict({"format": 2})


def test_a_second_fit_starts_anew(make_data: DataFactory, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    _, whole = fit(make_data(), max_steps=10, callbacks=[SaveAt("on_train_batch_end", 4, path)])
    data = make_data()
    fit(data, ckpt=path, max_steps=5)
    _, again = fit(data, max_steps=10)
    assert_same_end(again, whole, 0)
