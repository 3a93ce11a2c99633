"""Runs one training and writes down everything that must be equal; compares two such records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.verify import comparison
from lightning_3d.verify.comparison import number_error
from tests.parity.catalog import build, global_batches
from tests.parity.pipeline_table import PipelineRow
from tests.parity.table import BATCHES, SAMPLES_PER_RANK, Reference, Row
from tests.parity.tensor_table import TensorRow
from tests.parity.widened import widened

Run = Row | TensorRow | PipelineRow | Reference

CLIP = 0.5


@dataclass
class Record:
    """What a training did.

    Attributes:
        losses: Loss of each batch.
        gradients: Whole gradients by name before clipping, for each optimizer step.
        norms: Their norms, for each optimizer step.
        parameters: Whole parameters by name at the end.
        start: Whole parameters by name before training.
        logged: Logged values by name at the end.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


class Recorder(Callback):
    """Fills a record while a Trainer fits."""

    def __init__(self) -> None:
        self.record = Record()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.start = whole(dict(pl_module.named_parameters()), trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.record.losses.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = {name: parameter.grad for name, parameter in pl_module.named_parameters()}
        self.record.gradients.append(whole(gradients, trainer))
        flat = [gradient.double().flatten() for gradient in self.record.gradients[-1].values()]
        self.record.norms.append(float(torch.cat(flat).norm()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.parameters = whole(dict(pl_module.named_parameters()), trainer)
        self.record.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def whole(tensors: dict[str, Any], trainer: Trainer | None = None) -> dict[str, Tensor]:
    """Returns full copies of a module's tensors or DTensors, packed ones as the module had them.

    On a pipeline axis every rank gives all names, with what it holds.
    """
    strategy = None if trainer is None else trainer.strategy
    if isinstance(strategy, Mesh3DStrategy):
        full = strategy.full_tensors(tensors)
    else:
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items() if t is not None}
    return {name: tensor.detach().double().clone() for name, tensor in full.items()}


def train(rank: int, world: int, run: Run) -> Record | None:
    """Runs a row or a reference; rank 0 returns the record."""
    dtype = torch.float64 if run.precision == "64-true" else torch.float32
    samples = SAMPLES_PER_RANK * run.data * run.microbatches
    batches = global_batches(run.model, BATCHES[run.accumulate], samples, dtype)
    share, at = samples // run.data if world > 1 else samples, rank * run.data // world
    mine = [tuple(tensor[at * share : (at + 1) * share] for tensor in batch) for batch in batches]
    L.seed_everything(5, verbose=False)
    recorder = Recorder()
    with widened(run.model, run.precision):
        trainer = fit(build(run.model), mine, recorder, world=world, run=run)
    record = recorder.record
    record.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return record if rank == 0 else None


def fit(module: LightningModule, batches: list[Any], recorder: Callback, *, world: int, run: Run) -> Trainer:
    """Fits one epoch with clipping on the CPU and returns the Trainer."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Mesh3DStrategy(**run.strategy),  # type: ignore[arg-type]
        plugins=_precision(run.precision),
        max_epochs=1,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=CLIP,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return trainer


def _precision(name: str) -> Mesh3DPrecision:
    # A scale at which nothing overflows: before an overflow, shares of a batch on ranks are not those of one device.
    return Mesh3DPrecision(name, scaler=GradScaler("cpu", init_scale=1024.0) if name == "16-mixed" else None)


@dataclass(frozen=True)
class Difference:
    """How far two trainings are apart, each number relative as `error` says."""

    loss: float
    norm: float
    gradient: float
    parameter: float

    def within(self, bounds: Difference) -> bool:
        """Whether no number is above its bound."""
        return all(getattr(self, name) <= getattr(bounds, name) for name in ("loss", "norm", "gradient", "parameter"))

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, norm {self.norm:.1e}, gradients {self.gradient:.1e}, "
            f"parameters {self.parameter:.1e}"
        )


def compare(found: Record, expected: Record) -> Difference:
    """Returns the largest differences of two records of the same training."""
    assert len(found.losses) == len(expected.losses)
    assert len(found.gradients) == len(expected.gradients) > 0
    assert found.parameters.keys() == expected.parameters.keys()
    gradients = 0.0
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        largest = max(float(gradient.abs().max()) for gradient in theirs.values())
        gradients = max(gradients, *(error(mine[name], theirs[name], largest) for name in theirs))
    update = max(float((expected.parameters[n] - expected.start[n]).abs().max()) for n in expected.parameters)
    parameters = max(error(found.parameters[n], expected.parameters[n], update) for n in expected.parameters)
    scalars = [*zip(found.losses, expected.losses, strict=True)]
    scalars += [(found.logged[name], expected.logged[name]) for name in expected.logged]
    return Difference(
        loss=max(number_error(*pair) for pair in scalars),
        norm=max(map(number_error, found.norms, expected.norms)),
        gradient=gradients,
        parameter=parameters,
    )


def error(found: Tensor, expected: Tensor, largest: float) -> float:
    """max|a-b| / max|b|; what is below 1e-6 of the largest value of its kind is rounding of a true zero.

    Such a tensor (a bias before batch normalisation, a key's bias) is compared on the scale of the largest. What is
    not finite is infinitely far off: `max` would let a NaN pass.
    """
    return comparison.error(found, expected, lambda own: own if own >= 1e-6 * largest else largest)


# From the second step on gradients are taken at parameters that differ, and differ by as much.
FP32 = Difference(loss=1e-5, norm=1e-5, gradient=1e-4, parameter=1e-4)
FP64 = Difference(loss=1e-12, norm=1e-12, gradient=1e-11, parameter=1e-10)


def bounds(precision: str, reference: Record, in_fp32: Record | None) -> Difference:
    """Returns what a row may differ by: fixed bounds in fp64, else 3 x the precision's own distance from fp32."""
    if precision == "64-true":
        return FP64
    assert in_fp32 is not None
    own = compare(reference, in_fp32)
    return Difference(loss=3 * own.loss, norm=3 * own.norm, gradient=3 * own.gradient, parameter=3 * own.parameter)
