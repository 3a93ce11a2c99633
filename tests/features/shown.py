"""All that ``self.log`` shows to anybody, written down through every loop."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.features.here import Here
from tests.features.modules import Data, Module
from tests.features.table import Seen


def now(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Returns what callbacks, loggers and the progress bar are shown at this moment."""
    shown = {
        "callback": trainer.callback_metrics,
        "logged": trainer.logged_metrics,
        "bar": trainer.progress_bar_metrics,
    }
    return {kind: {name: float(value) for name, value in values.items()} for kind, values in shown.items()}


class Staged(Module):
    """Does the same in every stage: ``shared`` logs, and returns the loss."""

    def shared(self, stage: str, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.shared("test", batch)


class Sees(Callback):
    """Writes down what is shown whenever somebody may look."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.ends: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append(now(trainer))

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.steps.append(now(trainer))

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.ends.append(now(trainer))

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.ends.append(now(trainer))


class Hears(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "hears"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.heard.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Does nothing."""


def every_loop(here: Here, module: Module, data: Data | None = None, *callbacks: Callback, **options: Any) -> Seen:
    """Trains, validates and tests, and returns all that anybody could have been shown."""
    sees, hears = Sees(), Hears()
    trainer = here.trainer(sees, *callbacks, logger=hears, **{"max_epochs": 2, **options})
    data = data or Data(here)
    trainer.fit(module, data)
    fitted = now(trainer)
    results = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
    return {
        "steps": sees.steps,
        "ends": sees.ends,
        "logger": hears.heard,
        "fitted": fitted,
        "results": results,
        "tested": now(trainer),
    }
