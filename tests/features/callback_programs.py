"""Programs with callbacks that decide, search or write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.features.here import Here
from tests.features.modules import Data, Module, Samples, metrics, weights
from tests.features.table import Seen


def early_stopping(here: Here, **options: Any) -> Seen:
    stops = EarlyStopping(**options)
    trainer = here.trainer(stops, max_epochs=8)
    trainer.fit(Module(lr=0.3), Data(here))
    return {
        "epoch": trainer.current_epoch,
        "stopped": stops.stopped_epoch,
        "waited": stops.wait_count,
        "best": float(stops.best_score),
        "reason": stops.stopping_reason.name,
        "weights": weights(trainer),
    }


def timer(here: Here) -> Seen:
    stops = Timer(timedelta(seconds=0), interval="step")
    trainer = here.trainer(stops, max_epochs=3)
    trainer.fit(Module(), Data(here))
    return {"steps": trainer.global_step, "weights": weights(trainer), "took time": stops.time_elapsed("train") > 0}


class Spiking(Data):
    """One sample of the fourth batch is far from all others."""

    def train_dataloader(self) -> Any:
        samples = Samples(self.samples)
        samples.inputs[3 * self.batch_size] *= 100
        return self.here.loader(samples, self.batch_size)


def spikes(here: Here) -> Seen:
    detector = SpikeDetection(rtol=0.5, warmup=2, exclude_batches_path=here.directory / "skipped.json")
    trainer, spiked = here.trainer(detector), ""
    try:
        trainer.fit(Module(), Spiking(here))
    except TrainingSpikeException as error:
        spiked = str(error)
    return {
        "error": spiked,
        "skipped": detector.bad_batches,
        "last": float(detector.last_val),
        "mean": float(detector.running_mean.compute()),
    }


def learning_rate_finder(here: Here) -> Seen:
    finder = LearningRateFinder(min_lr=1e-4, max_lr=0.05, num_training_steps=16)
    trainer, module = here.trainer(finder), Module()
    trainer.fit(module, Data(here, samples=128))
    assert finder.optimal_lr is not None
    return {
        "found": finder.optimal_lr.results,
        "lr": module.lr,
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "files": sorted(path.name for path in here.directory.iterdir()),
    }


def tuner(here: Here) -> Seen:
    trainer, module, data = here.trainer(), Module(), Data(here, samples=128)
    finder = Tuner(trainer).lr_find(module, datamodule=data, min_lr=1e-4, max_lr=0.05, num_training=14, mode="linear")
    assert finder is not None
    lr = module.lr
    trainer.fit(module, data)
    return {"suggestion": finder.suggestion(), "lr": lr, "metrics": metrics(trainer), "weights": weights(trainer)}


def batch_size_finder(here: Here) -> Seen:
    finder = BatchSizeFinder(max_trials=1, steps_per_trial=1)
    here.trainer(finder).fit(Module(), Data(here))
    return {"size": finder.optimal_batch_size}


def scale_batch_size(here: Here) -> Seen:
    return {"size": Tuner(here.trainer()).scale_batch_size(Module(), datamodule=Data(here), max_trials=1)}


def pruning(here: Here) -> Seen:
    prunes = ModelPruning(
        "l1_unstructured", parameter_names=["weight"], amount=0.5, use_lottery_ticket_hypothesis=False
    )
    trainer = here.trainer(prunes, max_epochs=2)
    trainer.fit(Module(), Data(here))
    return {"weights": weights(trainer)}


class Writes(BasePredictionWriter):
    """Writes each batch and all of them to files of its rank."""

    def __init__(self, directory: Path) -> None:
        super().__init__("batch_and_epoch")
        self.directory = directory

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        torch.save((batch_indices, prediction), self.directory / f"batch {batch_idx} {trainer.global_rank}")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        torch.save((batch_indices, predictions), self.directory / f"epoch {trainer.global_rank}")

    def of_batches(self) -> list[tuple[int, int]]:
        """Returns index and prediction of each sample that was written."""
        written = [torch.load(file) for file in self.directory.glob("batch*")]
        return sorted(pair for indices, values in written for pair in _pairs(indices, values))

    def of_epoch(self) -> list[tuple[int, int]]:
        """Returns index and prediction of each sample that was written."""
        written = [torch.load(file) for file in self.directory.glob("epoch*")]
        batches = [batch for indices, values in written for batch in zip(indices[0], values, strict=True)]
        return sorted(pair for indices, values in batches for pair in _pairs(indices, values))


def _pairs(indices: Sequence[int], values: Tensor) -> list[tuple[int, int]]:
    return list(zip(indices, values.tolist(), strict=True))


def prediction_writer(here: Here) -> Seen:
    writer = Writes(here.directory)
    trainer = here.trainer(writer)
    trainer.predict(Module(), Data(here, samples=36), return_predictions=False)
    trainer.strategy.barrier()
    return {"batches": writer.of_batches(), "epoch": writer.of_epoch()}


def lambdas(here: Here) -> Seen:
    seen: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append("start"),
        on_train_batch_end=lambda trainer, module, outputs, batch, at: seen.append((at, trainer.global_step)),
        on_validation_end=lambda trainer, module: seen.append(float(trainer.callback_metrics["val_loss"])),
        on_before_optimizer_step=lambda trainer, module, optimizer: seen.append(type(optimizer).__name__),
    )
    here.trainer(callback, max_epochs=2).fit(Module(), Data(here))
    return {"seen": seen}


class Asks(Callback):
    """Asks the strategy what callbacks of Lightning and of the community ask."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy, inputs = trainer.strategy, batch[0]
        strategy.barrier("asks")
        loss = strategy.reduce(outputs["loss"])
        samples = strategy.reduce(torch.tensor(len(inputs)), reduce_op="sum")
        gathered = torch.as_tensor(strategy.all_gather(inputs.sum())).sum()
        wrong = strategy.reduce_boolean_decision(bool(inputs.isnan().any()), all=False)
        right = strategy.reduce_boolean_decision(bool(inputs.isfinite().all()))
        first = strategy.broadcast({"rank": trainer.global_rank, "batch": batch_idx})
        moved = strategy.batch_to_device(batch)
        here = all(part.device == strategy.root_device for part in moved)
        self.answers += [float(loss), int(samples), float(gathered), wrong, right, first, here]


def strategy_in_callbacks(here: Here) -> Seen:
    asks = Asks()
    trainer = here.trainer(asks)
    trainer.fit(Module(), Data(here))
    places = {
        "devices": trainer.num_devices == here.mesh.world,
        "nodes": trainer.num_nodes,
        "world": trainer.world_size == here.mesh.world,
        "rank": (trainer.global_rank, trainer.local_rank) == (here.rank, here.rank),
        "node": trainer.node_rank,
        "zero": (trainer.is_global_zero, trainer.strategy.is_global_zero) == (here.rank == 0, here.rank == 0),
    }
    return {"answers": asks.answers, "places": places, "directory": str(trainer.log_dir) == str(here.directory)}


class Hooked(Module):
    """Masks a gradient and scales another, by hooks that it sets when it is built."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones_like(self.net.head.weight)
        mask[0] = 0
        self.net.head.weight.register_hook(lambda gradient: gradient * mask)
        self.net.blocks[1].up.weight.register_hook(lambda gradient: gradient / 2)


def gradient_hooks(here: Here) -> Seen:
    trainer = here.trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(Hooked(), Data(here))
    return {"weights": weights(trainer)}
