"""Features of loops: how much of the data they take, and when they validate and end."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from tests.features.here import Here
from tests.features.modules import Data, Module, Samples, metrics, weights
from tests.features.table import Feature, Seen


class Counts(Callback):
    """Counts batches, and writes down after how many steps a validation ran and what it found."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}
        self.validations: list[tuple[int, float]] = []

    def _count(self, stage: str) -> None:
        self.batches[stage] = self.batches.get(stage, 0) + 1

    def on_train_batch_end(self, *_: Any) -> None:
        self._count("train")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._count("sanity" if trainer.sanity_checking else "validate")

    def on_test_batch_end(self, *_: Any) -> None:
        self._count("test")

    def on_predict_batch_end(self, *_: Any) -> None:
        self._count("predict")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def _everything(here: Here, **options: Any) -> Seen:
    """Fits, validates, tests and predicts with limited loops."""
    L.seed_everything(5, verbose=False)
    counts = Counts()
    trainer, module, data = here.trainer(counts, **options), Module(), Data(here)
    trainer.fit(module, data)
    fitted = metrics(trainer)
    trainer.validate(module, data, verbose=False)
    tested = trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    return {
        "fitted": fitted,
        "tested": tested,
        "batches": counts.batches,
        "validations": counts.validations,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "weights": weights(trainer),
    }


def _fit(here: Here, *callbacks: Callback, module: LightningModule | None = None, **options: Any) -> Seen:
    """Fits only."""
    L.seed_everything(5, verbose=False)
    counts = Counts()
    trainer = here.trainer(counts, *callbacks, **options)
    trainer.fit(module or Module(), Data(here))
    return {
        "metrics": metrics(trainer),
        "batches": counts.batches,
        "validations": counts.validations,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "weights": weights(trainer),
    }


def fast_dev_run(here: Here) -> Seen:
    return {"one batch": _everything(here, fast_dev_run=True), "three": _everything(here, fast_dev_run=3)}


def overfit_batches(here: Here) -> Seen:
    return {"number": _fit(here, overfit_batches=2, max_epochs=3), "part": _fit(here, overfit_batches=0.5)}


def limits_as_numbers(here: Here) -> Seen:
    return _everything(
        here,
        limit_train_batches=3,
        limit_val_batches=2,
        limit_test_batches=1,
        limit_predict_batches=1,
        max_epochs=2,
    )


def limits_as_parts(here: Here) -> Seen:
    return _everything(
        here, limit_train_batches=0.5, limit_val_batches=0.5, limit_test_batches=1.0, limit_predict_batches=0.5
    )


def no_validation(here: Here) -> Seen:
    return _everything(here, limit_val_batches=0, num_sanity_val_steps=2)


def val_check_interval(here: Here) -> Seen:
    return {
        "number": _fit(here, val_check_interval=3, max_epochs=2),
        "part": _fit(here, val_check_interval=0.5, max_epochs=2),
    }


def val_check_interval_over_epochs(here: Here) -> Seen:
    return _fit(here, val_check_interval=6, check_val_every_n_epoch=None, accumulate_grad_batches=2, max_epochs=4)


def check_val_every_n_epoch(here: Here) -> Seen:
    return _fit(here, check_val_every_n_epoch=2, max_epochs=4)


def sanity_check(here: Here) -> Seen:
    return {
        "two": _fit(here, num_sanity_val_steps=2),
        "all": _fit(here, num_sanity_val_steps=-1),
        "none": _fit(here, num_sanity_val_steps=0),
    }


class Reloads(Data):
    """Other data in every epoch."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.made = {"train": 0, "validate": 0}

    def train_dataloader(self) -> Any:
        self.made["train"] += 1
        return self.here.loader(Samples(16 * self.made["train"]), self.batch_size)

    def val_dataloader(self) -> Any:
        self.made["validate"] += 1
        return super().val_dataloader()


def reload_dataloaders(here: Here) -> Seen:
    counts, data = Counts(), Reloads(here)
    trainer = here.trainer(counts, reload_dataloaders_every_n_epochs=2, max_epochs=5)
    trainer.fit(Module(), data)
    return {
        "made": data.made,
        "batches": counts.batches,
        "validations": counts.validations,
        "weights": weights(trainer),
    }


def max_steps(here: Here) -> Seen:
    return {
        "inside an epoch": _fit(here, max_steps=6),
        "of accumulated batches": _fit(here, max_steps=3, accumulate_grad_batches=3),
    }


def min_epochs_and_steps(here: Here) -> Seen:
    def stopper() -> EarlyStopping:
        # Never better by that much.
        return EarlyStopping("val_loss", min_delta=100.0, patience=1)

    return {
        "alone": _fit(here, stopper(), max_epochs=8),
        "epochs": _fit(here, stopper(), max_epochs=8, min_epochs=4),
        "steps": _fit(here, stopper(), max_epochs=8, min_steps=14),
    }


class Sleeps(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)


def max_time(here: Here) -> Seen:
    trainer = here.trainer(max_time={"seconds": 0.3}, max_epochs=-1)
    trainer.fit(Sleeps(), Data(here))
    steps = [trainer.global_step] * here.mesh.world
    if here.mesh.world > 1:
        dist.all_gather_object(steps, trainer.global_step)
    # How many there were depends on the time, but not on the rank.
    return {"some": steps[0] > 0, "not all": steps[0] < 1000, "alike": len(set(steps)) == 1}


FEATURES: tuple[Feature, ...] = (
    Feature(name="fast_dev_run", program=fast_dev_run),
    Feature(name="overfit_batches", program=overfit_batches),
    Feature(name="limit_*_batches as numbers", program=limits_as_numbers),
    Feature(name="limit_*_batches as parts", program=limits_as_parts),
    Feature(name="limit_val_batches=0", program=no_validation),
    Feature(name="val_check_interval", program=val_check_interval),
    Feature(name="val_check_interval over epochs, accumulated", program=val_check_interval_over_epochs),
    Feature(name="check_val_every_n_epoch", program=check_val_every_n_epoch),
    Feature(name="num_sanity_val_steps", program=sanity_check),
    Feature(name="reload_dataloaders_every_n_epochs", program=reload_dataloaders),
    Feature(name="max_steps", program=max_steps),
    Feature(name="min_epochs and min_steps", program=min_epochs_and_steps),
    Feature(name="max_time", program=max_time),
)
