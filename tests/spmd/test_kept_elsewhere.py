"""What stands beside weights goes on with another mesh: averages, scaler, callbacks, several optimizers, schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DPrecision
from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import assert_same, of_one_kind

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

STEPS = 3
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {"zero_stage": 3}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "pipeline 2 x data 2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Foreach(Module):
    """A frozen subset, groups of a foreach optimizer, a rate that changes in each step."""

    options: ClassVar[dict[str, Any]] = {"foreach": True}

    def configure_optimizers(self) -> Any:
        next(self.parameters()).requires_grad_(False)
        trained = [each for each in self.parameters() if each.requires_grad]
        groups = [{"params": trained[::2], "weight_decay": 0.2}, {"params": trained[1::2], "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, **self.options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Fused(Foreach):
    options: ClassVar[dict[str, Any]] = {"fused": True}


class InFp32(Foreach):
    """Takes its samples in fp32."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0].float(), batch[1]))


class Several(Module):
    """Two optimizers of other kinds, one of which steps every other time, each with a schedule."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if not batch_idx % 2:
            second.step()
        # A checkpoint holds no gradients.
        second.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        first = torch.optim.AdamW(parameters[:2], lr=self.lr, amsgrad=True)
        second = torch.optim.SGD(parameters[2:], lr=self.lr, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (first, second)]


class Counts(Callback):
    """Has a state of tensors, numbers and text."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"steps": 0, "sum": torch.zeros(2, dtype=torch.float64), "name": ""}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen["steps"] += 1
        self.seen["sum"] += self.seen["steps"]
        self.seen["name"] += "a"

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class SavesAt(Callback):
    """Saves after some steps."""

    def __init__(self, paths: dict[int, Path]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        make: Builds the module.
        callbacks: Make callbacks.
        precision: Makes the precision.
        keys: What of a checkpoint is compared; all that is there if it is empty.
        count: Steps that the Trainer counts for each batch.
    """

    make: Callable[[], LightningModule]
    callbacks: Sequence[Callable[[], Callback]] = ()
    precision: Callable[[], Mesh3DPrecision] = field(default=lambda: Mesh3DPrecision("64-true"))
    keys: tuple[str, ...] = ()


def fit(
    rank: int, world: int, name: str, strategy: dict[str, Any], paths: dict[int, Path], resume: Path | None
) -> None:
    """Trains, perhaps from a checkpoint, and saves."""
    L.seed_everything(5, verbose=False)
    case = CASES[name]
    run = trainer(
        world,
        *(make() for make in case.callbacks),
        SavesAt(paths),
        strategy=strategy,
        plugins=case.precision(),
        max_steps=max(paths),
        limit_val_batches=0,
    )
    data = DataLoader(Samples(64), 8 // run.strategy.data_size, shuffle=True)
    run.fit(case.make(), data, DataLoader(Samples(8), 2), ckpt_path=resume)


def scaled() -> Mesh3DPrecision:
    """Its scale grows at every other step."""
    return Mesh3DPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=8.0, growth_interval=2))


CASES = {
    "averages, callbacks, foreach, frozen": Case(make=Foreach, callbacks=(EMAWeightAveraging, Counts)),
    "fused": Case(make=Fused, callbacks=(Counts,)),
    "several optimizers": Case(make=Several),
    "scaler": Case(make=InFp32, precision=scaled, keys=("MixedPrecision", "global_step", "lr_schedulers")),
}
FILE = {"save_distributed_checkpoint": False}
# What tells of paths and versions, or of loaders, which other meshes have others of.
_APART = ("lightning_3d", "loops", "pytorch-lightning_version")


@pytest.mark.parametrize(
    ("name", "source", "targets"),
    [
        ("averages, callbacks, foreach, frozen", "pipeline 2 x data 2", ("tensor 2", "one")),
        more("averages, callbacks, foreach, frozen", "tensor 2", ("pipeline 2 x data 2", "data 2")),
        more("averages, callbacks, foreach, frozen", "data 2", ("one",)),
        more("fused", "data 2", ("pipeline 2 x data 2", "one")),
        ("several optimizers", "data 2", ("tensor 2", "one")),
        more("several optimizers", "tensor 2", ("data 2", "one")),
        ("scaler", "data 2", ("pipeline 2 x data 2", "one")),
        more("scaler", "pipeline 2 x data 2", ("tensor 2",)),
    ],
)
def test_goes_on_elsewhere(name: str, source: str, targets: Sequence[str], tmp_path: Path) -> None:
    world, strategy = MESHES[source]
    step = STEPS
    run_spmd(fit, 1, name, FILE, {2 * step: tmp_path / "whole.ckpt"}, None)
    run_spmd(fit, world, name, strategy, {step: tmp_path / "first.ckpt"}, None)
    expected = torch.load(tmp_path / "whole.ckpt")
    keys = CASES[name].keys or tuple(key for key in expected if key not in _APART)
    assert {"state_dict", "optimizer_states"} <= {*keys} or "MixedPrecision" in keys
    for target in targets:
        there, options = MESHES[target]
        path = tmp_path / f"{target}.ckpt"
        run_spmd(fit, there, name, options | FILE, {2 * step: path}, tmp_path / "first.ckpt")
        found = torch.load(path)
        for key in keys:
            assert_same(of_one_kind(found[key]), of_one_kind(expected[key]), f"{target}, {key}")
