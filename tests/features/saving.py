"""Features of saving: when ModelCheckpoint writes, what it keeps, and what stands in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.features.here import CUBE, Here
from tests.features.modules import Data, Module, metrics, weights
from tests.features.table import Feature, Seen

# What only a strategy on a mesh writes into a file.
_OURS = ("lightning_3d",)


def saver_of(here: Here, **options: Any) -> ModelCheckpoint:
    """Returns a ModelCheckpoint into the directory of the run."""
    return ModelCheckpoint(**({"dirpath": here.directory / "kept"} | options))


def kept(saver: ModelCheckpoint) -> dict[str, Any]:
    """Returns what a ModelCheckpoint knows and what lies on the disk, by file name."""
    assert saver.dirpath is not None
    score = saver.best_model_score
    return {
        "files": sorted(entry.name for entry in Path(saver.dirpath).iterdir() if entry.suffix == ".ckpt"),
        "best": Path(saver.best_model_path).name,
        "best score": None if score is None else float(score),
        "scores": {Path(path).name: float(score) for path, score in saver.best_k_models.items()},
        "worst kept": Path(saver.kth_best_model_path).name,
        "last": Path(saver.last_model_path).name,
    }


def double(lr: float = 0.01) -> Module:
    """Returns a module in fp64: plain Lightning would load a checkpoint before it converts it, and lose digits."""
    return Module(lr).double()


def _fitted(here: Here, *savers: ModelCheckpoint, **options: Any) -> Trainer:
    trainer = here.trainer(*savers, enable_checkpointing=True, **options)
    trainer.fit(double(lr=0.05), Data(here))
    return trainer


def _tested(here: Here, trainer: Trainer, *paths: str) -> list[dict[str, float]]:
    """Returns what a fresh module with the weights of each checkpoint does."""
    found = []
    for path in paths:
        trainer.test(double(), Data(here), ckpt_path=path, verbose=False)
        found.append(metrics(trainer))
    return found


def top_k(here: Here) -> Seen:
    saver = saver_of(here, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
    trainer = _fitted(here, saver, max_epochs=4)
    return {"kept": kept(saver), "tested": _tested(here, trainer, *saver.best_k_models)}


def top_k_of_training(here: Here) -> Seen:
    saver = saver_of(here, monitor="train_loss_step", mode="max", save_top_k=2, every_n_train_steps=1)
    trainer = _fitted(here, saver, max_epochs=2)
    return {"kept": kept(saver), "tested": _tested(here, trainer, *saver.best_k_models)}


def last(here: Here) -> Seen:
    saver = saver_of(here, monitor="val_loss", mode="max", save_last=True)
    trainer = _fitted(here, saver, max_epochs=2)
    return {"kept": kept(saver), "tested": _tested(here, trainer, "last", "best", saver.last_model_path)}


def last_as_link(here: Here) -> Seen:
    saver = saver_of(here, monitor="val_loss", save_last="link", save_top_k=2)
    trainer = _fitted(here, saver, max_epochs=3)
    link = os.readlink(saver.last_model_path)
    return {"kept": kept(saver), "link": link, "tested": _tested(here, trainer, "last", saver.last_model_path)}


def every_steps(here: Here) -> Seen:
    saver = saver_of(here, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = _fitted(here, saver, max_epochs=2)
    return {"kept": kept(saver), "tested": _tested(here, trainer, *(f"{saver.dirpath}/step={n}.ckpt" for n in (3, 6)))}


def every_epochs(here: Here) -> Seen:
    saver = saver_of(here, every_n_epochs=2, save_top_k=-1)
    _fitted(here, saver, max_epochs=4)
    return {"kept": kept(saver)}


def by_time(here: Here) -> Seen:
    saver = saver_of(here, train_time_interval=timedelta(0), save_top_k=-1)
    _fitted(here, saver)
    return {"kept": kept(saver)}


def at_the_end_of_training_epochs(here: Here) -> Seen:
    often = saver_of(here, save_on_train_epoch_end=True, save_top_k=-1, filename="trained-{epoch}")
    rarely = saver_of(
        here, dirpath=here.directory / "validated", save_on_train_epoch_end=False, save_top_k=-1, monitor="val_loss"
    )
    _fitted(here, often, rarely, max_epochs=4, check_val_every_n_epoch=2)
    return {"often": kept(often), "rarely": kept(rarely)}


def one_name(here: Here) -> Seen:
    counted = saver_of(here, filename="same", monitor="val_loss", save_top_k=2, save_last=True)
    replaced = saver_of(here, dirpath=here.directory / "replaced", filename="same", enable_version_counter=False)
    _fitted(here, counted, replaced, max_epochs=3)
    again = saver_of(here, filename="same", save_last=True)
    trainer = _fitted(here, again)
    tested = _tested(here, trainer, *counted.best_k_models, replaced.best_model_path)
    return {"counted": kept(counted), "replaced": kept(replaced), "again": kept(again), "tested": tested}


def by_default(here: Here) -> Seen:
    trainer = _fitted(here)
    saver = trainer.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    return {"kept": kept(saver), "where": str(Path(str(saver.dirpath)).relative_to(here.directory))}


def weights_alone(here: Here) -> Seen:
    saver = saver_of(here, save_weights_only=True)
    trainer = _fitted(here, saver)
    tested = _tested(here, trainer, saver.best_model_path)
    refused = ""
    try:
        here.trainer(max_epochs=2).fit(double(), Data(here), ckpt_path=saver.best_model_path)
    except KeyError as error:
        refused = str(error)
    return {"kept": kept(saver), "tested": tested, "resuming": refused}


class Stops(Callback):
    """Fails before the sixth batch."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            raise ValueError("no more")


def _stopped(here: Here, saver: Callback) -> str:
    trainer = here.trainer(saver, Stops(), enable_checkpointing=True, max_epochs=2)
    try:
        trainer.fit(double(), Data(here))
    except ValueError as error:
        return str(error)
    return "not stopped"


def on_exception(here: Here) -> Seen:
    saver = OnExceptionCheckpoint(here.directory / "broken")
    raised = _stopped(here, saver)
    content = torch.load(saver.ckpt_path, weights_only=True)
    return {"raised": raised, **{key: content[key] for key in ("state_dict", "optimizer_states", "loops")}}


def on_exception_by_model_checkpoint(here: Here) -> Seen:
    saver = saver_of(here, save_on_exception=True, save_last=True, filename="{step}", save_top_k=-1)
    return {"raised": _stopped(here, saver), "kept": kept(saver)}


class ByHand(Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def by_hand(here: Here) -> Seen:
    middle, end, tested = (here.directory / f"{name}.ckpt" for name in ("middle", "end", "tested"))
    trainer, module = here.trainer(ByHand(middle)), double()
    trainer.fit(module, Data(here))
    trainer.save_checkpoint(end)
    trainer.test(module, Data(here), verbose=False)
    trainer.save_checkpoint(tested)
    resumed = {}
    for path in (middle, end, tested):
        again = here.trainer(max_epochs=2)
        again.fit(double(), Data(here), ckpt_path=path)
        resumed[path.stem] = {"weights": weights(again), "metrics": metrics(again), "steps": again.global_step}
    return resumed


def one_file(here: Here) -> Seen:
    saver = saver_of(here, save_last=True, monitor="val_loss")
    trainer = _fitted(here, saver, max_epochs=2)
    path = here.directory / "end.ckpt"
    trainer.save_checkpoint(path)
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return {key: _names_alone(value) for key, value in sorted(content.items()) if key not in _OURS}


def _names_alone(value: Any) -> Any:
    """Leaves directories out of paths, and the order of dicts."""
    if isinstance(value, Mapping):
        return {_names_alone(key): _names_alone(part) for key, part in sorted(value.items(), key=str)}
    if isinstance(value, str) and os.sep in value:
        return Path(value).name
    return value


FEATURES: tuple[Feature, ...] = (
    Feature(name="ModelCheckpoint(save_top_k=2, monitor=...)", program=top_k, always=(CUBE,)),
    Feature(name="ModelCheckpoint of a value of training steps", program=top_k_of_training),
    Feature(name="ModelCheckpoint(save_last=True)", program=last),
    Feature(name='ModelCheckpoint(save_last="link")', program=last_as_link),
    Feature(name="ModelCheckpoint(every_n_train_steps=3)", program=every_steps),
    Feature(name="ModelCheckpoint(every_n_epochs=2)", program=every_epochs),
    Feature(name="ModelCheckpoint(train_time_interval=...)", program=by_time),
    Feature(name="ModelCheckpoint(save_on_train_epoch_end=...)", program=at_the_end_of_training_epochs),
    Feature(name="ModelCheckpoint(filename=...) of one name, versions", program=one_name),
    Feature(name="ModelCheckpoint(save_weights_only=True)", program=weights_alone),
    Feature(name="ModelCheckpoint(save_on_exception=True)", program=on_exception_by_model_checkpoint),
    Feature(name="OnExceptionCheckpoint", program=on_exception, options={"save_distributed_checkpoint": False}),
    Feature(name="the Trainer's own ModelCheckpoint", program=by_default),
    Feature(name="trainer.save_checkpoint in a step, after fit, after test", program=by_hand),
    Feature(
        name="one file, entry by entry",
        program=one_file,
        options={"save_distributed_checkpoint": False},
        note="`save_distributed_checkpoint=False`",
    ),
)
