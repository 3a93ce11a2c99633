"""Features of resuming: a training that goes on is the one that was never stopped, and what users keep beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lightning_3d import Mesh3DStrategy
from tests.features.here import CUBE, ONE_DEVICE, Here
from tests.features.modules import CLASSES, WIDTH, Data, Module, Samples, metrics, weights
from tests.features.saving import double, saver_of
from tests.features.table import Feature, Seen


class Scheduled(Module):
    """Has a learning rate that changes within epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.parameters()][::-1], lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Diary(Callback):
    """Writes down every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        loss = float(trainer.callback_metrics["train_loss_step"])
        self.steps.append((trainer.current_epoch, trainer.global_step, rate, loss))


def moments(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the state of AdamW, whole and by name."""
    (optimizer,), strategy = trainer.optimizers, trainer.strategy
    found = {}
    for name, parameter in trainer.lightning_module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            value = optimizer.state.get(parameter, {}).get(key)
            found[f"{name} {key}"] = (
                strategy.full_tensor(name, value) if isinstance(strategy, Mesh3DStrategy) else value.clone()
            )
    return found


def fitted(trainer: Trainer, module: LightningModule, data: Data, **options: Any) -> dict[str, Any]:
    """Trains and returns all that is known then."""
    diary = Diary()
    trainer.callbacks.append(diary)
    trainer.fit(module, data, **options)
    trainer.callbacks.remove(diary)
    return {
        "steps": diary.steps,
        "at": (trainer.current_epoch, trainer.global_step),
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "moments": moments(trainer),
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def scheduled() -> LightningModule:
    return Scheduled(lr=0.03).double()


def saving_trainer(here: Here, *callbacks: Callback, epochs: int = 1, **options: Any) -> Trainer:
    """Returns a Trainer that keeps the best and the last."""
    saver = saver_of(here, monitor="val_loss", save_last=True)
    return here.trainer(saver, *callbacks, enable_checkpointing=True, max_epochs=epochs, **options)


def resumed(here: Here) -> Seen:
    unbroken = fitted(here.trainer(max_epochs=3), scheduled(), Data(here))
    fitted(saving_trainer(here), scheduled(), Data(here))
    path = here.directory / "kept" / "last.ckpt"
    return {
        "unbroken": unbroken,
        "resumed": fitted(here.trainer(max_epochs=3), scheduled(), Data(here), ckpt_path=path),
    }


def resumed_twice(here: Here) -> Seen:
    runs = {}
    for epochs in (1, 2, 3):
        trainer = saving_trainer(here, epochs=epochs)
        runs[f"{epochs} epochs"] = fitted(trainer, scheduled(), Data(here), ckpt_path="last")
    return runs


def resumed_from_the_best(here: Here) -> Seen:
    trainer = saving_trainer(here, epochs=2)
    first = fitted(trainer, scheduled(), Data(here))
    trainer.fit_loop.max_epochs = 3
    return {"first": first, "from the best": fitted(trainer, scheduled(), Data(here), ckpt_path="best")}


def resumed_within_an_epoch(here: Here) -> Seen:
    saver = saver_of(here, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = here.trainer(saver, enable_checkpointing=True, max_epochs=2)
    fitted(trainer, scheduled(), Data(here))
    path = here.directory / "kept" / "step=3.ckpt"
    return fitted(here.trainer(max_epochs=2, num_sanity_val_steps=0), scheduled(), Data(here), ckpt_path=path)


# ---- what users keep in checkpoints ----


class Counts(Callback):
    """Has a state, and something beside it."""

    def __init__(self) -> None:
        self.batches, self.means = 0, torch.zeros(2)
        self.found: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.means += self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "means": self.means, "names": ("a", {"b"})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.means = state_dict["batches"], state_dict["means"]
        assert state_dict["names"] == ("a", {"b"})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the callback"] = [self.batches, self.means.tolist()]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["of the callback"]


class KeepsMore(Scheduled):
    """Keeps what it has counted."""

    def __init__(self) -> None:
        super().__init__(lr=0.03)
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class DataWithState(Data):
    """Has other samples in each epoch."""

    epochs = 0

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return self.here.loader(Samples(self.samples, seed=self.epochs), self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def kept_beside(here: Here) -> Seen:
    saving_trainer(here, Counts()).fit(KeepsMore().double(), DataWithState(here))
    counts, module, data = Counts(), KeepsMore().double(), DataWithState(here)
    trainer = saving_trainer(here, counts, epochs=2, reload_dataloaders_every_n_epochs=1)
    seen = fitted(trainer, module, data, ckpt_path="last")
    return {
        **seen,
        "callback": (counts.batches, counts.means, counts.found),
        "module": module.seen,
        "data": data.epochs,
        "best": Path(str(trainer.checkpoint_callback.best_model_path)).name,  # type: ignore[union-attr]
    }


class Renamed(Scheduled):
    """Calls its network by another name than the one that was saved, and starts with another bias."""

    def __init__(self) -> None:
        super().__init__(lr=0.03)
        self.body = self.net
        del self.net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state: Mapping[str, Tensor] = checkpoint["state_dict"]
        edited = {name.replace("net.", "body."): value for name, value in state.items()}
        edited["body.head.bias"] = torch.arange(CLASSES, dtype=torch.float64)
        checkpoint["state_dict"] = edited


def edited(here: Here) -> Seen:
    trainer = saving_trainer(here)
    trainer.fit(scheduled(), Data(here))
    trainer.test(Renamed().double(), Data(here), ckpt_path="best", verbose=False)
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


class Grown(Module):
    """Has a head more than what was saved."""

    def __init__(self) -> None:
        super().__init__(lr=0.03)
        self.strict_loading = False
        self.more = nn.Linear(CLASSES, CLASSES)
        nn.init.eye_(self.more.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.more(super().forward(inputs))


def grown(here: Here) -> Seen:
    trainer = saving_trainer(here)
    trainer.fit(double(0.03), Data(here))
    trainer.validate(Grown().double(), Data(here), ckpt_path="last", verbose=False)
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


# ---- adapters ----


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))


class Adapters(Scheduled):
    """Trains adapters alone."""

    def __init__(self) -> None:
        super().__init__(lr=0.03)
        self.strict_loading = False
        torch.manual_seed(7)
        self.net.requires_grad_(False)
        for block in self.net.blocks:
            block.up = Adapted(block.up)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class SavesAdapters(Adapters):
    """Leaves frozen weights out of its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {name: checkpoint["state_dict"][name] for name in sorted(trained)}


class HasAdapters(Adapters):
    """Has no frozen weights in its state."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **options).items() if name not in frozen}


def adapters(here: Here, kind: type[Adapters]) -> Seen:
    trainer = saving_trainer(here)
    trainer.fit(kind().double(), Data(here))
    names = set[str]()

    class Reads(kind):  # type: ignore[misc, valid-type]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            names.update(checkpoint["state_dict"])

    again = fitted(here.trainer(max_epochs=2), Reads().double(), Data(here), ckpt_path=_last(here))
    return {"saved": sorted(names), **again}


def _last(here: Here) -> Path:
    return here.directory / "kept" / "last.ckpt"


# ---- hyper-parameters ----


class Configured(Module):
    """Is built from a config."""

    def __init__(self, cfg: DictConfig, classes: int = CLASSES, sizes: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__(cfg.lr)
        self.save_hyperparameters()


def hyper_parameters(here: Here) -> Seen:
    cfg = OmegaConf.create({"data": {"lr": 0.03}, "model": {"lr": "${data.lr}", "widths": [1, 2]}})
    saving_trainer(here).fit(Configured(cfg.model).double(), Data(here))
    found: dict[str, Any] = {}

    class Reads(Configured):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            found.update(checkpoint["hyper_parameters"])

    # Plain Lightning has to trust the file; on a mesh there is nothing to trust.
    trust = False if here.mesh == ONE_DEVICE else None
    trainer = here.trainer(max_epochs=2)
    seen = fitted(trainer, Reads(cfg.model).double(), Data(here), ckpt_path=_last(here), weights_only=trust)
    trainer.test(Configured(cfg.model).double(), Data(here), ckpt_path=_last(here), weights_only=False, verbose=False)
    assert isinstance(found["cfg"], DictConfig)
    found["cfg"] = OmegaConf.to_container(found["cfg"], resolve=True)
    return {**seen, "found": found, "tested": metrics(trainer)}


FEATURES: tuple[Feature, ...] = (
    Feature(name="fit(ckpt_path=...)", program=resumed, always=(CUBE,)),
    Feature(name='fit(ckpt_path="last"), twice in a row', program=resumed_twice),
    Feature(name='fit(ckpt_path="best") on the same Trainer', program=resumed_from_the_best),
    Feature(name="fit(ckpt_path=...) within an epoch", program=resumed_within_an_epoch),
    Feature(name="state of callbacks, datamodule and module", program=kept_beside),
    Feature(name="on_load_checkpoint edits weights", program=edited),
    Feature(name="strict_loading=False, a new layer", program=grown),
    Feature(name="on_save_checkpoint keeps adapters alone", program=partial(adapters, kind=SavesAdapters)),
    Feature(name="state_dict() of adapters alone", program=partial(adapters, kind=HasAdapters)),
    Feature(name="save_hyperparameters with OmegaConf", program=hyper_parameters),
)
