"""Features: averages of weights, by Lightning's callbacks, by torch and by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import Subset

from tests.features.here import CUBE, Here
from tests.features.modules import WIDTH, Classifies, Data, Module, Samples, metrics, weights
from tests.features.table import Feature, Seen

_DECAY = 0.7


def fitted(here: Here, module: LightningModule, *callbacks: Callback, **options: Any) -> Trainer:
    """Returns a Trainer that has trained for two epochs."""
    trainer = here.trainer(*callbacks, **{"max_epochs": 2} | options)
    # In the precision of the Trainer, so that averages, which are made before it converts the module, have it too.
    trainer.fit(module.double(), Data(here))
    return trainer


def seen(trainer: Trainer) -> dict[str, Any]:
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


# ---- Lightning's callbacks ----


def averaging(here: Here, make: Callable[[], Callback], module: Callable[[], LightningModule] = Module) -> Seen:
    trainer = fitted(here, module(), make())
    after = seen(trainer)
    return {**after, "tested": trainer.test(trainer.lightning_module, Data(here), verbose=False)}


def swa_like(average: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
    return average + (current - average) / (count + 1)


class Buffered(Module):
    """Has a buffer that counts, so that its average is not its last value."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


class Normed(nn.Module):
    """A layer with running statistics before linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.down(F.relu(self.up(self.norm(hidden))))
        return hidden + inner


class WithStatistics(Module):
    """Its blocks have running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Normed() for _ in range(2))


class InPairs(Data):
    """Trains on batches whose halves are equal, so that each of two data ranks sees the statistics of one device."""

    def train_dataloader(self) -> Any:
        halves = [range(start, start + 4) for start in range(0, 16, 4)]
        return self.here.loader(Subset(Samples(16), [index for half in halves for index in (*half, *half)]), 8)


def with_statistics(here: Here, make: Callable[[], Callback]) -> Seen:
    """Weights and means alone: each data rank's variances are of fewer samples, which torch corrects for."""
    trainer = here.trainer(make(), max_epochs=3, limit_val_batches=0)
    trainer.fit(WithStatistics().double(), InPairs(here))
    return {name: tensor for name, tensor in weights(trainer).items() if not name.endswith("running_var")}


class Later(Module):
    """Makes its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if "net" not in self._modules:
            self.net = Classifies()


def resumed(here: Here, make: Callable[[], Callback]) -> Seen:
    saved = ModelCheckpoint(here.directory, filename="{epoch}", save_top_k=-1)
    first = fitted(here, Module(), make(), saved, max_epochs=3, enable_checkpointing=True)
    second = here.trainer(make(), max_epochs=3)
    second.fit(Module().double(), Data(here), ckpt_path=str(here.directory / "epoch=0.ckpt"))
    return {"first": seen(first), "second": seen(second)}


def in_one_file(here: Here, make: Callable[[], Callback]) -> Seen:
    """What a checkpoint in the middle of training holds for those who know nothing of meshes."""
    path = here.directory / "half.ckpt"
    fitted(here, Module(), make(), SaveAfter(6, path))
    content = torch.load(path, weights_only=True)
    return {
        "loaded": dict(Module.load_from_checkpoint(path, map_location="cpu").state_dict()),
        "current": content.get("current_model_state", {}),
        "averaging": content.get("averaging_state", {}),
        "callbacks": content["callbacks"],
    }


class SaveAfter(Callback):
    """Saves a checkpoint after some batches."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


# ---- by torch, by hand ----


class KeepsAverage(Module):
    """Averages its own layers as torch's documentation shows, and validates both."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(_DECAY), use_buffers=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("average_loss", F.cross_entropy(self.average(batch[0]), batch[1]), sync_dist=True)


class Teaches(Module):
    """A slow copy of the layers teaches the fast one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(batch[0])
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, taught)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.mul_(_DECAY).add_(fast, alpha=1 - _DECAY)


def by_module(here: Here, make: Callable[[], LightningModule]) -> Seen:
    return seen(fitted(here, make()))


class Average(Callback):
    """Averages the layers in torch's AveragedModel, and puts the average in their place at the end.

    Args:
        begin: The hook in which the average is made.
        whole: Average the LightningModule, not its layers alone.
    """

    def __init__(self, begin: str, whole: bool = False) -> None:
        self.whole = whole
        setattr(self, begin, self.begin)

    def of(self, module: LightningModule) -> nn.Module:
        return module if self.whole else module.get_submodule("net")

    def begin(self, trainer: Trainer, module: LightningModule, stage: str = "fit") -> None:
        if stage == "fit":
            self.average = AveragedModel(self.of(module), avg_fn=get_ema_avg_fn(_DECAY))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.average.update_parameters(self.of(module))

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if hasattr(self, "average"):
            inputs = torch.linspace(0, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
            with torch.no_grad():
                module.log("from_average", self.average.module(inputs).sum())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.of(module).load_state_dict(self.average.module.state_dict())


class ByHand(Callback):
    """Averages in tensors of its own, validates with them, and gives the weights back.

    Args:
        begin: The hook in which the average is made.
    """

    def __init__(self, begin: str) -> None:
        setattr(self, begin, self.begin)

    def begin(self, trainer: Trainer, module: LightningModule, stage: str = "fit") -> None:
        if stage == "fit":
            self.average = {name: each.detach().clone() for name, each in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        for name, parameter in module.named_parameters():
            self.average[name].lerp_(parameter.to(self.average[name].dtype), 1 - _DECAY)

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.kept = copy.deepcopy(module.state_dict())
        for name, parameter in module.named_parameters():
            parameter.copy_(self.average[name])

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.load_state_dict(self.kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def by_callback(here: Here, make: Callable[[], Callback]) -> Seen:
    return seen(fitted(here, Module(), make()))


_EMA = partial(EMAWeightAveraging, decay=_DECAY)
_SWA = partial(StochasticWeightAveraging, swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
_ONE_MICROBATCH = {"num_microbatches": 1}
_ONE_FILE = {"save_distributed_checkpoint": False}
_OWN = partial(WeightAveraging, avg_fn=swa_like)

FEATURES: tuple[Feature, ...] = (
    Feature(
        name="EMAWeightAveraging, validating and testing with the average",
        program=partial(averaging, make=_EMA),
        always=(CUBE,),
    ),
    Feature(
        name="EMAWeightAveraging from a later step, every second one",
        program=partial(averaging, make=partial(_EMA, update_starting_at_step=2, update_every_n_steps=2)),
    ),
    Feature(
        name="EMAWeightAveraging by epoch",
        program=partial(averaging, make=partial(_EMA, update_starting_at_epoch=0, update_every_n_steps=0)),
    ),
    Feature(
        name="EMAWeightAveraging of a module that configure_model makes",
        program=partial(averaging, make=_EMA, module=Later),
    ),
    Feature(name="WeightAveraging with an avg_fn, buffers too", program=partial(averaging, make=_OWN, module=Buffered)),
    Feature(
        name="WeightAveraging without buffers",
        program=partial(averaging, make=partial(_OWN, use_buffers=False), module=Buffered),
    ),
    Feature(
        name="WeightAveraging, resumed from a sharded checkpoint",
        program=partial(resumed, make=_EMA),
        always=(CUBE,),
    ),
    Feature(name="WeightAveraging, resumed from a file", program=partial(resumed, make=_EMA), options=_ONE_FILE),
    Feature(
        name="WeightAveraging: the file holds the average, and the weights beside it",
        program=partial(in_one_file, make=_EMA),
        options=_ONE_FILE,
        always=(CUBE,),
    ),
    Feature(name="StochasticWeightAveraging", program=partial(averaging, make=_SWA), always=(CUBE,)),
    Feature(
        name="EMAWeightAveraging with batch normalisation",
        program=partial(with_statistics, make=_EMA),
        options=_ONE_MICROBATCH,
    ),
    Feature(
        name="StochasticWeightAveraging with batch normalisation, whose statistics it renews",
        program=partial(with_statistics, make=_SWA),
        options=_ONE_MICROBATCH,
    ),
    Feature(name="StochasticWeightAveraging, resumed", program=partial(resumed, make=_SWA)),
    Feature(
        name="StochasticWeightAveraging: the file holds the average",
        program=partial(in_one_file, make=_SWA),
        options=_ONE_FILE,
    ),
    Feature(
        name="AveragedModel as a part of the module", program=partial(by_module, make=KeepsAverage), always=(CUBE,)
    ),
    Feature(name="a copy of the layers that teaches them", program=partial(by_module, make=Teaches)),
    Feature(
        name="AveragedModel made in a callback's setup",
        program=partial(by_callback, make=partial(Average, "setup")),
    ),
    Feature(
        name="AveragedModel made in on_fit_start",
        program=partial(by_callback, make=partial(Average, "on_fit_start")),
        always=(CUBE,),
    ),
    Feature(
        name="AveragedModel of the whole LightningModule, made in on_train_start",
        program=partial(by_callback, make=partial(Average, "on_train_start", whole=True)),
    ),
    Feature(
        name="an average in tensors of a callback, made in setup",
        program=partial(by_callback, make=partial(ByHand, "setup")),
    ),
    Feature(
        name="an average in tensors of a callback, made in on_fit_start",
        program=partial(by_callback, make=partial(ByHand, "on_fit_start")),
    ),
)
