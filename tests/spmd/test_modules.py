"""Habits of real modules: at every ZeRO stage they must train as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import ModuleError
from tests.parity.measure import whole
from tests.spmd.fits import Fit, assert_equal_to_one_device, fit, loader, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import (
    Adapted,
    Borrows,
    Caller,
    Frozen,
    Heads,
    Owner,
    Plain,
    Regularised,
    RegularisedFirst,
    SometimesRegularised,
    Temperature,
    Tied,
    Twice,
    classified,
)

pytestmark = pytest.mark.spmd

# Windows of two batches and a short one; with two micro-batches each.
BATCHES = classified(5, 8)
TRAINER = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def at_every_stage(make: Any, *stages: int, **trainer: Any) -> list[Fit]:
    return [
        Fit(
            make=make, batches=BATCHES, trainer=TRAINER | trainer, strategy={"zero_stage": stage, "num_microbatches": 2}
        )
        for stage in stages or range(4)
    ]


@pytest.mark.parametrize("makes", [(Twice, Owner, Tied), (Caller, Heads), (Frozen, Adapted), (Temperature,)], ids=str)
def test_equals_one_device_at_every_stage(makes: tuple[Any, ...]) -> None:
    assert_equal_to_one_device(2, *(case for make in makes for case in at_every_stage(make)))


class Unfreeze(BaseFinetuning):
    """Blocks 0 and 1 begin to train with the second epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.model.blocks[:2])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[:2], optimizer, lr=1e-3)


class Trainable(Plain):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def test_a_callback_unfreezes_between_epochs() -> None:
    records = assert_equal_to_one_device(
        2, *at_every_stage(Trainable, max_epochs=2, callbacks=[Unfreeze], accumulate_grad_batches=1)
    )
    for record in records:
        trained = [len(gradients) for gradients in record.gradients]
        assert trained == 5 * [10] + 5 * [18]


@pytest.mark.parametrize("make", [Regularised, RegularisedFirst, SometimesRegularised])
def test_penalty_on_all_parameters_is_exact(make: Any) -> None:
    assert_equal_to_one_device(2, *at_every_stage(make, 0, 1, 2, 3))


def resumed(rank: int, world: int, path: Path) -> list[dict[str, Tensor]]:
    """Parameters after two epochs in one run, and after a checkpoint between them."""
    batches = [share(batch, rank, world) for batch in BATCHES]
    found = []
    for epochs, resume in ((2, None), (1, None), (2, path)):
        run = trainer(
            world,
            strategy={"zero_stage": 2},
            plugins=Mesh3DPrecision("64-true"),
            max_epochs=epochs,
            use_distributed_sampler=False,
        )
        torch.manual_seed(0)
        module = Temperature()
        run.fit(module, loader(batches), ckpt_path=resume)
        if epochs == 1:
            run.save_checkpoint(path)
        else:
            found.append(whole(dict(module.named_parameters())))
    return found


def test_scalars_are_saved_and_resumed(tmp_path: Path) -> None:
    for once, again in run_spmd(resumed, 2, tmp_path / "between"):
        assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_read_outside_their_block_are_a_clear_error(stage: int) -> None:
    run_spmd(refused, 2, at_every_stage(Borrows, stage))


def refused(rank: int, world: int, cases: list[Fit]) -> None:
    with pytest.raises(ModuleError, match=r"outside the block that owns it, .*\n  valid: attributes of modules"):
        fit(rank, world, *cases)
