"""Features of one run after another: fit, validate, test and predict on one Trainer, and weights that go elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.features.here import CUBE, ONE_DEVICE, Here, Mine
from tests.features.modules import Data, Module, metrics, weights
from tests.features.resuming import fitted, saving_trainer, scheduled
from tests.features.saving import double
from tests.features.table import Feature, Seen


def every_run(here: Here, *, new: bool) -> Seen:
    trainer, module = saving_trainer(here, epochs=2), double(0.05)
    trainer.fit(module, Data(here))
    best = {"score": float(trainer.checkpoint_callback.best_model_score)}  # type: ignore[union-attr]

    def module_for_it() -> LightningModule:
        return double() if new else module

    tested = trainer.test(module_for_it(), Data(here), ckpt_path="best", verbose=False)
    predictions = trainer.predict(module_for_it(), Data(here), ckpt_path="last" if new else None)
    validated = trainer.validate(module_for_it(), Data(here), ckpt_path="last", verbose=False)
    assert predictions is not None
    return {
        "best": best,
        "tested": tested,
        "predicted": Mine(predictions),
        "validated": validated,
        "weights": weights(trainer),
    }


def without_a_module(here: Here) -> Seen:
    trainer, data = saving_trainer(here, epochs=2), Data(here)
    trainer.fit(double(0.05), data)
    tested = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    predictions = trainer.predict(datamodule=data, ckpt_path="last")
    assert predictions is not None
    return {"tested": tested, "predicted": Mine(predictions), "weights": weights(trainer)}


def fit_again(here: Here) -> Seen:
    trainer, module = here.trainer(), scheduled()
    first = fitted(trainer, module, Data(here))
    trainer.fit_loop.max_epochs = 3
    again = fitted(trainer, module, Data(here))
    trainer.fit_loop.max_epochs = 4
    other = fitted(trainer, scheduled(), Data(here))
    return {"first": first, "again": again, "another module": other}


def between(here: Here) -> Seen:
    trainer, module = here.trainer(max_epochs=1), double(0.05)
    before = trainer.validate(module, Data(here), verbose=False)
    trainer.fit(module, Data(here))
    tested = trainer.test(module, Data(here), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, Data(here))
    after = trainer.validate(module, Data(here), verbose=False)
    return {"before": before, "tested": tested, "after": after, "weights": weights(trainer)}


def alone(here: Here, verb: str) -> Seen:
    saving_trainer(here).fit(double(0.05), Data(here))
    path = here.directory / "kept" / "last.ckpt"
    trainers = here.trainer(), here.trainer()
    shown, quiet = (Mine, {}) if verb == "predict" else (list, {"verbose": False})
    plain = getattr(trainers[0], verb)(double(), Data(here), **quiet)
    loaded = getattr(trainers[1], verb)(double(), Data(here), ckpt_path=path, **quiet)
    return {"plain": shown(plain), "loaded": shown(loaded), "metrics": [metrics(trainer) for trainer in trainers]}


# ---- plain Lightning before and after ----


def plain_trainer(here: Here, **options: Any) -> Trainer:
    """Returns a Trainer of plain Lightning on one device, in every process."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        precision="64-true",
        default_root_dir=here.directory,
        **(quiet | options),
    )


def to_one_device(here: Here) -> Seen:
    saving_trainer(here).fit(scheduled(), Data(here))
    path = here.directory / "kept" / "last.ckpt"
    whole = Data(Here(mesh=ONE_DEVICE, rank=here.rank, directory=here.directory))
    seen = fitted(plain_trainer(here, max_epochs=2), scheduled(), whole, ckpt_path=path)
    loaded = Module.load_from_checkpoint(path, lr=0.5)
    return {"plain": seen, "loaded": dict(loaded.state_dict()), "lr": loaded.lr, "hparams": dict(loaded.hparams)}


def from_one_device(here: Here) -> Seen:
    path = here.directory / f"plain{here.rank}.ckpt"
    whole = Data(Here(mesh=ONE_DEVICE, rank=here.rank, directory=here.directory))
    plain = plain_trainer(here)
    plain.fit(scheduled(), whole)
    plain.save_checkpoint(path)
    seen = fitted(here.trainer(max_epochs=2), scheduled(), Data(here), ckpt_path=path)
    tested = here.trainer()
    return {**seen, "tested": tested.test(scheduled(), Data(here), ckpt_path=path, verbose=False)}


# ---- plugins that write ----


class Archive(TorchCheckpointIO):
    """Writes as torch does, and knows what it has done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.done: list[tuple[str, str]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self._note("saved", path)
        assert storage_options in (None, "mine")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"inside": checkpoint}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        self._note("loaded", path)
        return torch.load(path, map_location="cpu", weights_only=True)["inside"]

    def remove_checkpoint(self, path: Any) -> None:
        self._note("removed", path)
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        self._note("ended", "")

    def _note(self, what: str, path: Any) -> None:
        with (self.directory / "done.txt").open("a") as file:
            file.write(f"{what} {Path(path).name}\n")


def own_io(here: Here) -> Seen:
    trainer = saving_trainer(here, epochs=2, plugins=[Archive(here.directory)])
    trainer.fit(scheduled(), Data(here))
    trainer.save_checkpoint(here.directory / "end.ckpt", storage_options="mine")
    written = [line for line in (here.directory / "done.txt").read_text().splitlines() if line.startswith("saved")]
    path = here.directory / "end.ckpt"
    assert path.is_file()
    again = here.trainer(max_epochs=3, plugins=[Archive(here.directory)])
    return {"written": written, **fitted(again, scheduled(), Data(here), ckpt_path=path)}


def async_io(here: Here) -> Seen:
    trainer = saving_trainer(here, epochs=2, plugins=[AsyncCheckpointIO()])
    trainer.fit(scheduled(), Data(here))
    trainer.strategy.barrier()
    path = here.directory / "kept" / "last.ckpt"
    assert path.is_file()
    return fitted(here.trainer(max_epochs=3), scheduled(), Data(here), ckpt_path=path)


# ---- parts that are compiled ----


class Compiled(Module):
    """Compiles blocks and the head."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        for index, block in enumerate(self.net.blocks):
            self.net.blocks[index] = torch.compile(block, backend="aot_eager")
        self.net.head = torch.compile(self.net.head, backend="eager")


class Eager(Module):
    """Takes the weights of a compiled one."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = eager_names(checkpoint["state_dict"])


def eager_names(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state without the marks of torch.compile."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def compiled(here: Here) -> Seen:
    trainer = saving_trainer(here)
    trainer.fit(Compiled().double(), Data(here))
    path = here.directory / "kept" / "last.ckpt"
    again = here.trainer(max_epochs=2)
    again.fit(Compiled().double(), Data(here), ckpt_path=path)
    eager = here.trainer()
    eager.test(Eager().double(), Data(here), ckpt_path=path, verbose=False)
    return {"again": eager_names(weights(again)), "metrics": metrics(again), "eager": metrics(eager)}


# ---- what callbacks see ----


class Looks(Callback):
    """Notes names, shapes and kinds of parameters at each hook."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[str, tuple[int, ...], bool]]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.seen[f"setup {stage}"] = self._look(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["fit"] = self._look(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen["batch"] = self._look(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.seen[f"teardown {stage}"] = self._look(pl_module)

    def _look(self, module: LightningModule) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, tuple(value.shape), value.requires_grad) for name, value in module.named_parameters()]


def callbacks_look(here: Here) -> Seen:
    looks = Looks()
    trainer, module = here.trainer(looks), double()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    trainer.fit(module, Data(here))
    trainer.test(module, Data(here), verbose=False)
    fresh = Module().double()
    fresh.load_state_dict(weights(trainer))
    return {**looks.seen, "before": before, "after": dict(fresh.named_parameters())}


FEATURES: tuple[Feature, ...] = (
    Feature(name='fit, test("best"), predict, one module', program=partial(every_run, new=False), always=(CUBE,)),
    Feature(name='fit, test("best"), predict, new modules', program=partial(every_run, new=True), always=(CUBE,)),
    Feature(name='fit, test("best"), predict, without naming a module', program=without_a_module),
    Feature(name="fit again with more epochs", program=fit_again),
    Feature(name="validate, fit, test, fit, validate", program=between),
    Feature(name="validate alone", program=partial(alone, verb="validate")),
    Feature(name="test alone", program=partial(alone, verb="test")),
    Feature(name="predict alone", program=partial(alone, verb="predict")),
    Feature(
        name="a checkpoint in plain Lightning, load_from_checkpoint",
        program=to_one_device,
        options={"save_distributed_checkpoint": False},
        note="`save_distributed_checkpoint=False`",
    ),
    Feature(name="a checkpoint of plain Lightning", program=from_one_device),
    Feature(name="a CheckpointIO of one's own", program=own_io),
    Feature(name="AsyncCheckpointIO", program=async_io),
    Feature(name="checkpoints of torch.compile'd parts", program=compiled),
    Feature(name="parameters as callbacks see them", program=callbacks_look),
)
