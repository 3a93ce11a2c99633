"""Checkpoints of pipelines through the Trainer go on with any other mesh, one device and plain Lightning included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.marks import more
from tests.spmd.fits import QUIET, loader, share
from tests.spmd.pool import run_spmd
from tests.spmd.speaker import Speaker, words
from tests.spmd.tensor_runs import assert_same

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

BATCHES = 3
ALONE: dict[str, Any] = {}
PIPE = {"pipeline_parallel_size": 2}
TURNS = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved1f1b"}
DATA = {"pipeline_parallel_size": 2, "zero_stage": 3}
TENSOR = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


class Told(Callback):
    """Writes down weights and moments when training starts, and weights when it has ended."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = state_of(trainer, pl_module)
        (optimizer,) = trainer.optimizers
        for name, parameter in pl_module.named_parameters():
            if not name.startswith("spare"):
                state = optimizer.state.get(parameter, {})
                for key in ("exp_avg", "exp_avg_sq") if trainer.global_step else ():
                    self.moments[f"{key} {name}"] = whole(trainer, name, state.get(key))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end = state_of(trainer, pl_module)


def whole(trainer: Trainer, name: str, value: Tensor | None) -> Tensor:
    strategy = trainer.strategy
    if isinstance(strategy, Mesh3DStrategy):
        return strategy.full_tensor(name, value).clone()
    assert value is not None
    return value.detach().clone()


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    strategy = trainer.strategy
    state = strategy.full_state_dict() if isinstance(strategy, Mesh3DStrategy) else module.state_dict()
    for name, parameter in module.named_parameters():
        assert torch.equal(whole(trainer, name, parameter), state[name])
    return {name: value.clone() for name, value in state.items()}


def fitted(
    rank: int,
    world: int,
    strategy: Any,
    *,
    epochs: int = 1,
    resume: Path | None = None,
    save: Path | None = None,
    seed: int = 2,
) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    ours, told = isinstance(strategy, dict), Told()
    module = Speaker().double()
    trainer = L.Trainer(
        **QUIET,
        devices=world,
        strategy=Mesh3DStrategy(num_microbatches=2, **strategy) if ours else strategy,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[told],
        **({"plugins": Mesh3DPrecision("64-true")} if ours else {"precision": "64-true"}),
    )
    model = strategy.get("pipeline_parallel_size", 1) * strategy.get("tensor_parallel_size", 1) if ours else 1
    mine = loader(share(batch, rank // model, world // model) for batch in words(BATCHES))
    trainer.fit(module, mine, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
        assert module.hooks == [*module.state_dict()]
    return {"start": told.start, "moments": told.moments, "end": told.end}


def saved_and_resumed(tmp_path: Path, source: Any, target: Any, worlds: tuple[int, int], distributed: bool) -> None:
    path = tmp_path / "a.ckpt"
    chosen = {**source, "save_distributed_checkpoint": distributed}
    run_spmd(fitted, worlds[0], chosen, save=path, timeout=90)
    (expected,) = run_spmd(fitted, 1, ALONE, epochs=1, save=tmp_path / "one.ckpt", timeout=90)
    (longer,) = run_spmd(fitted, 1, ALONE, epochs=2, resume=tmp_path / "one.ckpt", seed=4, timeout=90)
    for rank, found in enumerate(run_spmd(fitted, worlds[1], target, epochs=2, resume=path, seed=4, timeout=90)):
        assert_same(found["start"], expected["end"], f"rank {rank}, start")
        assert found["moments"].keys() == longer["moments"].keys()
        assert_same(found, longer, f"rank {rank}")


@pytest.mark.parametrize("distributed", [True, more(False)], ids=["directory", "file"])
@pytest.mark.parametrize(
    ("source", "target", "worlds"),
    [
        (PIPE, ALONE, (2, 1)),
        (ALONE, TURNS, (1, 2)),
        (DATA, TENSOR, (4, 4)),
        more(TENSOR, DATA, (4, 4)),
    ],
    ids=["pipeline to one", "one to pipeline", "data to tensor", "tensor to data"],
)
def test_goes_on_elsewhere(
    tmp_path: Path, source: Any, target: Any, worlds: tuple[int, int], distributed: bool
) -> None:
    saved_and_resumed(tmp_path, source, target, worlds, distributed)


def test_plain_lightning_goes_on_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_spmd(fitted, 2, {**PIPE, "save_distributed_checkpoint": False}, save=path, timeout=90)
    (ours,) = run_spmd(fitted, 1, ALONE, epochs=2, resume=path, seed=4, timeout=90)
    (found,) = run_spmd(fitted, 1, "auto", epochs=2, resume=path, seed=4, timeout=90)
    assert_same(found["start"], ours["start"], "start")
    assert_same(found["moments"], ours["moments"], "moments")
    stored = torch.load(path)
    assert stored["doubled"].keys() == {name for name, _ in Speaker().named_parameters()}
    assert all(torch.equal(value, stored["state_dict"][name] * 2) for name, value in stored["doubled"].items())


def test_a_file_of_plain_lightning_goes_on_in_a_pipeline(tmp_path: Path) -> None:
    run_spmd(fitted, 1, "auto", save=tmp_path / "a.ckpt", timeout=90)
    (alone,) = run_spmd(fitted, 1, ALONE, epochs=2, resume=tmp_path / "a.ckpt", seed=4, timeout=90)
    for rank, found in enumerate(run_spmd(fitted, 2, PIPE, epochs=2, resume=tmp_path / "a.ckpt", timeout=90)):
        assert_same(found, alone, f"rank {rank}")
