"""What a run did, written down whole: on one device and on any mesh alike."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d.batches.weights import LOSS_WEIGHT, loss_of
from lightning_3d.strategy import Mesh3DStrategy

_FILE = "record.pt"


@dataclass
class Record:
    """What a training did.

    Attributes:
        losses: The loss of each batch; empty if the step returns none.
        logged: The logged values by name, after each batch.
        gradients: Whole gradients by name before clipping, of each optimizer step.
        start: The whole state by name before training: parameters and buffers.
        end: The same after it.
        parameters: Which names are parameters that are trained, all names of tied ones.
        elements: How many elements they have.
        plan: The plan of the mesh.
        watched: What was seen of the inside of the first batch, on one device.
    """

    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    elements: int = 0
    plan: str = ""
    watched: dict[str, Any] = field(default_factory=dict)

    @property
    def plan_hash(self) -> str:
        """Twelve digits that tell plans apart."""
        return hashlib.sha256(self.plan.encode()).hexdigest()[:12]

    def digest(self) -> str:
        """Returns a text that tells what was done on one rank from what was done on another, to the bit."""
        found = hashlib.sha256(repr((self.losses, self.logged)).encode())
        for tensors in (*self.gradients, self.end):
            for name, tensor in sorted(tensors.items()):
                found.update(name.encode())
                found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def write(self, directory: Path) -> None:
        """Writes it into a directory."""
        torch.save(vars(self), directory / _FILE)

    @classmethod
    def read(cls, directory: Path) -> Record:
        """Returns the record in a directory; its tensors stay in the file until they are looked at."""
        return cls(**torch.load(directory / _FILE, mmap=True, weights_only=True))


class Recorder(Callback):
    """Fills a record while a Trainer fits; every rank has one, since what is whole is brought together."""

    def __init__(self) -> None:
        self.record = Record()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes down the initial state and the plan."""
        strategy = _mesh(trainer)
        self.record.start = _kept(strategy.full_state_dict())
        every = pl_module.named_parameters(remove_duplicate=False)
        self.record.parameters = [name for name, each in every if each.requires_grad]
        self.record.elements = sum(each.numel() for each in pl_module.parameters() if each.requires_grad)
        # Not what `explain` adds to it, such as how long its proof took.
        self.record.plan = str(strategy._module_on_mesh.plan)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Writes down the gradients."""
        gradients = {name: parameter.grad for name, parameter in pl_module.named_parameters()}
        self.record.gradients.append(_kept(_mesh(trainer).full_tensors(gradients)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes down the loss over all data ranks, and what was logged."""
        loss = loss_of(outputs)
        if loss is not None:
            weight = outputs.get(LOSS_WEIGHT) if isinstance(outputs, dict) else None
            self.record.losses.append(_mean(trainer, loss, weight))
        self.record.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes down the state that was reached."""
        self.record.end = _kept(_mesh(trainer).full_state_dict())
        self.record.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def _mean(trainer: Trainer, loss: Tensor, weight: Any) -> float:
    reduce = trainer.strategy.reduce
    if weight is None:
        return float(reduce(loss.detach().clone(), reduce_op="mean"))
    own = torch.as_tensor(weight, dtype=loss.dtype)
    total = reduce(own.clone(), reduce_op="sum")
    return float(reduce(loss.detach() * own, reduce_op="sum")) / float(total)


def _mesh(trainer: Trainer) -> Mesh3DStrategy:
    assert isinstance(trainer.strategy, Mesh3DStrategy)
    return trainer.strategy


def _kept(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: each.detach().cpu().clone() for name, each in tensors.items() if isinstance(each, Tensor)}
