"""Averages that callbacks keep of packed and padded weights: equal to one device's, through checkpoints too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn

from lightning_3d import Mesh3DStrategy
from lightning_3d.errors import ModuleError
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import QUIET, loader
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import assert_same, of_one_kind, tokens
from tests.spmd.test_pad_vocabulary import Words

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PADDED: dict[str, Any] = {"tensor_parallel_size": 2, "pad_vocabulary": True}
BOTH: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}


class Kept(Callback):
    """Keeps copies that it makes of a cut module and of its state, and has them in its own state."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begun = copy.deepcopy(module.state_dict())
        self.average = copy.deepcopy(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        for mine, parameter in zip(self.average.parameters(), module.parameters(), strict=True):
            mine.lerp_(parameter, 0.2)
        self.before, self.average = self.average, copy.deepcopy(self.average)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.loaded = copy.deepcopy(module)
        self.loaded.load_state_dict(self.begun)
        self.average.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        parts = {"average": self.average, "before": self.before, "loaded": self.loaded}
        return {"begun": self.begun, **{name: part.state_dict() for name, part in parts.items()}}


def gpt() -> nn.Module:
    """The same packed weights everywhere, without dropout."""
    torch.manual_seed(4)
    model = PackedGPT()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def packed() -> L.LightningModule:
    return NextToken(gpt())


def fit(
    rank: int, world: int, make: Callable[[], L.LightningModule], strategy: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Trains, saves a file in the end, trains again from it, and returns what both files hold."""
    found = []
    path = None
    for epochs in (1, 2):
        chosen = Mesh3DStrategy(**strategy, save_distributed_checkpoint=False) if strategy else "auto"
        trainer = L.Trainer(
            **QUIET,
            devices=world,
            strategy=chosen,
            precision="64-true",
            use_distributed_sampler=False,
            max_epochs=epochs,
            callbacks=[EMAWeightAveraging(decay=0.5), Kept()],
        )
        trainer.fit(make().double(), loader(tokens(2)), ckpt_path=path)
        path = directory / f"{epochs}.ckpt"
        trainer.save_checkpoint(path)
        found.append(torch.load(path, weights_only=True))
    keys = ("state_dict", "current_model_state", "averaging_state", "callbacks")
    return {f"{key} of {epoch}": each[key] for epoch, each in enumerate(found) for key in keys}


@pytest.mark.parametrize(
    ("make", "strategy", "world"),
    [(packed, TENSOR, 2), (Words, PADDED, 2), (packed, BOTH, 4), (packed, {"zero_stage": 3}, 2)],
    ids=["packed", "padded", "packed on a pipeline", "beside units"],
)
def test_checkpoints_hold_averages_whole(
    make: Callable[[], L.LightningModule], strategy: dict[str, Any], world: int, tmp_path: Path
) -> None:
    found = run_spmd(fit, world, make, strategy, tmp_path, timeout=90)
    (expected,) = run_spmd(fit, 1, make, {}, tmp_path)
    for rank, seen in enumerate(found):
        assert_same(of_one_kind(seen), of_one_kind(expected), f"rank {rank}")


class Calls(NextToken):
    """Its step calls an average of the model that lies beside it."""

    def __init__(self) -> None:
        super().__init__(gpt())
        self.beside: list[Any] = []

    def on_train_start(self) -> None:
        self.beside.append(copy.deepcopy(self.model))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            taught = self.beside[0](batch[0]).mean() if self.beside else 0.0
        return self.loss(batch) + taught


def calls(rank: int, world: int, strategy: dict[str, Any]) -> float:
    chosen = Mesh3DStrategy(**strategy) if strategy else "auto"
    module = Calls()
    trainer = L.Trainer(
        **QUIET, devices=world, strategy=chosen, precision="64-true", use_distributed_sampler=False, max_epochs=1
    )
    trainer.fit(module, loader(tokens(2)))
    return float(module.beside[0](tokens(1)[0][0]).detach().sum())


@pytest.mark.parametrize("strategy", [TENSOR, {"zero_stage": 1}], ids=["tensor", "data"])
def test_copies_can_be_called_anywhere(strategy: dict[str, Any]) -> None:
    (expected,) = run_spmd(calls, 1, {})
    assert run_spmd(calls, 2, strategy) == pytest.approx([expected, expected])


def refused(rank: int, world: int) -> None:
    with pytest.raises(ModuleError, match=r"(?s)a step calls a copy of a PackedGPT .*self.average = copy.deepcopy"):
        calls(rank, world, PIPELINE)


def test_a_step_of_a_pipeline_does_not_call_them() -> None:
    run_spmd(refused, 2)
