"""Checkpoints of tensor-parallel trainings go on with any other mesh, one device and plain Lightning included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.checkpoint.packed import PackedTensor
from lightning_3d.errors import CheckpointError
from tests.marks import more
from tests.parity.catalog import build, global_batches
from tests.parity.models import NextToken
from tests.spmd.fits import QUIET, loader, share
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import assert_same, plain

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

PACKED, LLAMA = "packed GPT (tied)", "HF Llama (GQA)"
SAMPLES, BATCHES = 4, 3
ALONE: dict[str, Any] = {}
TENSOR = {"tensor_parallel_size": 2}
WIDE = {"tensor_parallel_size": 4}
DATA = {"data_parallel_size": 4, "zero_stage": 1}
BOTH = {"tensor_parallel_size": 2, "zero_stage": 3}


class Told(Callback):
    """Writes down weights and moments when training starts, and what becomes of them."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = self._whole(trainer, pl_module)
        (optimizer,) = trainer.optimizers
        for name, parameter in pl_module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                self.moments[f"{key} {name}"] = _whole(trainer, name, value)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end = self._whole(trainer, pl_module)

    @staticmethod
    def _whole(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
        return {name: _whole(trainer, name, parameter) for name, parameter in module.named_parameters()}


def _whole(trainer: Trainer, name: str, value: Tensor) -> Tensor:
    strategy = trainer.strategy
    return plain(strategy.full_tensor(name, value) if isinstance(strategy, Mesh3DStrategy) else value.detach())


class Edits(NextToken):
    """Changes weights while they are loaded, in several ways; packed and tied ones too."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        first = "model.blocks.0.attention.pack"
        packed = state[f"{first}.weight"]
        if isinstance(packed, PackedTensor):
            with pytest.raises(CheckpointError, match=r"compute on tensor\.full_tensor"):
                packed * 0.5
            packed = packed.full_tensor()
        state[f"{first}.weight"] = packed * 0.5
        state[f"{first}.bias"] = torch.linspace(-1, 1, 96, dtype=torch.float64)
        state["model.norm.weight"].mul_(2)
        state["model.tokens.weight"] = state["model.head.weight"] = torch.ones(96, 32, dtype=torch.float64)


def module_of(name: str, kind: type[NextToken] = NextToken) -> NextToken:
    """The module without dropout: meshes of other data degrees draw other masks."""
    # Plain Lightning loads weights before it converts the module.
    module = kind(build(name).model).double()
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if hasattr(child, "attention_dropout"):
            child.attention_dropout = 0.0
    return module


def fitted(
    rank: int, world: int, module: NextToken, name: str, strategy: Any, epochs: int, resume: Path | None
) -> tuple[Trainer, Told]:
    L.seed_everything(2, verbose=False)
    told = Told()
    ours = isinstance(strategy, dict)
    trainer = L.Trainer(
        **QUIET,
        devices=world,
        strategy=Mesh3DStrategy(**strategy) if ours else strategy,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[told],
        **({"plugins": Mesh3DPrecision("64-true")} if ours else {"precision": "64-true"}),
    )
    data = world // strategy.get("tensor_parallel_size", 1) if ours else 1
    batches = global_batches(name, BATCHES, SAMPLES)
    at = rank * data // world
    trainer.fit(module, loader(share(batch, at, data) for batch in batches), ckpt_path=resume, weights_only=True)
    return trainer, told


def trained(
    rank: int, world: int, name: str, strategy: Any, path: Path | None, *, epochs: int = 1, resume: Path | None = None
) -> dict[str, Any]:
    """Trains, perhaps from a checkpoint, and saves one."""
    trainer, told = fitted(rank, world, module_of(name), name, strategy, epochs, resume)
    if path is not None:
        trainer.save_checkpoint(path)
    return {"start": told.start, "moments": told.moments, "losses": told.losses, "end": told.end}


def resumed(
    rank: int, world: int, name: str, meshes: tuple[Any, ...], path: Path, save: tuple[Any, Path] | None = None
) -> list[dict[str, Any]]:
    """Goes on from a checkpoint on several meshes, one after the other; saves one training's first epoch anew."""
    found = [trained(rank, world, name, mesh, None, epochs=2, resume=path) for mesh in meshes]
    if save is not None:
        trained(rank, world, name, save[0], save[1])
    return found


@pytest.mark.parametrize("name", [PACKED, more(LLAMA)])
def test_resumes_on_every_mesh(name: str, tmp_path: Path) -> None:
    first, both = tmp_path / "tensor.ckpt", tmp_path / "both.ckpt"
    (whole,) = run_spmd(trained, 1, name, ALONE, None, epochs=2)
    run_spmd(trained, 2, name, TENSOR, first)
    found = {
        "tensor 2 on 1": run_spmd(resumed, 1, name, (ALONE,), first),
        "tensor 2 on 4": run_spmd(resumed, 4, name, (WIDE, DATA, BOTH), first, (BOTH, both), timeout=120),
        "data 2 x tensor 2 on 2": run_spmd(resumed, 2, name, (TENSOR,), both),
        "data 2 x tensor 2 on 1": run_spmd(resumed, 1, name, (ALONE,), both),
    }
    (saved,) = run_spmd(resumed, 1, name, (ALONE,), first)[0]
    assert len(saved["moments"]) == 3 * len(saved["start"])
    for place, ranks in found.items():
        for rank, meshes in enumerate(ranks):
            for mesh, each in enumerate(meshes):
                where = f"{place}, rank {rank}, mesh {mesh}"
                assert_same(each["start"], saved["start"], where)
                assert_same(each["moments"], saved["moments"], where)
                assert_same(each["losses"], whole["losses"][BATCHES:], where)
                assert_same(each["end"], whole["end"], where, close=1e-8)


# ---- files of plain Lightning ----


def loaded(rank: int, world: int, path: Path) -> dict[str, Any]:
    """What a plain process finds in a file, and goes on with."""
    module = NextToken.load_from_checkpoint(path, model=module_of(PACKED).model, weights_only=True)
    assert module.model.head.weight is module.model.tokens.weight
    found = {"loaded": {name: each.detach().clone() for name, each in module.named_parameters()}}
    return found | trained(rank, world, PACKED, "auto", None, epochs=2, resume=path)


def test_one_file_is_a_file_of_plain_lightning(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    (whole,) = run_spmd(trained, 1, PACKED, "auto", None, epochs=2, process_group=False)
    run_spmd(trained, 1, PACKED, "auto", theirs, process_group=False)
    saved = run_spmd(trained, 2, PACKED, {**TENSOR, "save_distributed_checkpoint": False}, ours)[0]
    assert ours.is_file()
    (found,) = run_spmd(loaded, 1, ours, process_group=False)
    assert_same(found["loaded"], saved["end"], "loaded")
    resumed_on = [
        found,
        *run_spmd(resumed, 2, PACKED, (TENSOR,), theirs)[0],
        *run_spmd(resumed, 4, PACKED, (WIDE,), ours)[3],
    ]
    for place, each in enumerate(resumed_on):
        assert_same(each["start"], saved["end"], f"start {place}")
        assert_same(each["losses"], whole["losses"][BATCHES:], f"losses {place}")
        assert_same(each["end"], whole["end"], f"end {place}", close=1e-8)


# ---- edited while they are loaded ----


def edited(rank: int, world: int, strategy: dict[str, Any], paths: tuple[Path, ...]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        told = fitted(rank, world, module_of(PACKED, Edits), PACKED, strategy, 2, path)[1]
        found.append({"start": told.start, "losses": told.losses})
    return found


def test_edits_of_hooks_arrive(tmp_path: Path) -> None:
    paths = (tmp_path / "directory.ckpt", tmp_path / "file.ckpt")
    for path, distributed in zip(paths, (True, False), strict=True):
        run_spmd(trained, 2, PACKED, {**TENSOR, "save_distributed_checkpoint": distributed}, path)
    (expected,) = run_spmd(edited, 1, ALONE, paths)
    assert float(expected[0]["start"]["model.norm.weight"].mean()) > 1.5
    for rank in run_spmd(edited, 2, TENSOR, paths):
        assert_same(rank, expected, "edited")
