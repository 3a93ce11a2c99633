"""What a load says of itself, on every mesh: restored, converted, edited, missing, not used; no layers are swapped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from lightning_3d.checkpoint.report import LoadReport
from lightning_3d.errors import CheckpointError
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(240),
    # Lightning's own notices of what the report says as well.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The checkpoint was not created with WeightAveraging:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

WIDTH = 8
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2, zero 3": (2, {"zero_stage": 3}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_parallel_size": 2, "pipeline_stack": "blocks"}),
}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Smooth(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(L.LightningModule):
    kinds: tuple[type[Plain], ...] = (Plain, Smooth)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in self.kinds)
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).pow(2).mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Swapped(Net):
    kinds = (Smooth, Plain)


class SwappedOnPurpose(Swapped):
    strict_loading = False


class Partial(Net):
    """Saves no head, and loads without one."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("head.")}
        checkpoint["words"] = ["a", "b"]


class Edits(Partial):
    """Edits in each of three ways what it loads."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["blocks.0.up.bias"] = torch.ones(2 * WIDTH)
        state["blocks.1.down.bias"].mul_(2)
        del state["blocks.1.up.bias"]
        state["strange"] = torch.zeros(3)


class Keeps(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


def run(
    rank: int, world: int, make: type[Net], strategy: dict[str, Any], *, steps: int, precision: Any, **options: Any
) -> Mesh3DStrategy:
    L.seed_everything(1, verbose=False)
    callbacks = [make() for make in options.pop("callbacks", ())]
    path, test = options.pop("path", None), options.pop("test", False)
    keeps = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    fit = trainer(
        world, *callbacks, strategy=strategy, max_steps=steps, precision=precision, enable_checkpointing=keeps
    )
    size = 8 // fit.strategy.data_size
    data = DataLoader(torch.randn(64, WIDTH, dtype=torch.float64 if precision == "64-true" else torch.float32), size)
    if test:
        fit.test(make(), data, ckpt_path=path, verbose=False)
    else:
        fit.fit(make(), data, ckpt_path=path)
    assert isinstance(fit.strategy, Mesh3DStrategy)
    return fit.strategy


def saves(rank: int, world: int, make: type[Net], strategy: dict[str, Any], directory: Path) -> None:
    saver = ModelCheckpoint(directory, "a", every_n_train_steps=2)
    run(rank, world, make, strategy, steps=2, precision="64-true", callbacks=(lambda: saver, Keeps))


def loads(
    rank: int, world: int, make: type[Net], strategy: dict[str, Any], path: Path, precision: str, **options: Any
) -> tuple[LoadReport, list[str]]:
    told: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.extend([record.getMessage()] if ": restored " in record.getMessage() else [])

    listener = Listens()
    loggers = [logging.getLogger(name) for name in ("lightning_3d", "lightning.pytorch.utilities.rank_zero")]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        report = run(rank, world, make, strategy, steps=4, precision=precision, path=path, **options).load_report
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
    assert report is not None
    return report, told


@pytest.mark.parametrize(("source", "target"), [("data 2, zero 3", "tensor 2"), ("tensor 2", "pipeline 2")])
def test_says_what_was_restored(source: str, target: str, tmp_path: Path) -> None:
    (world, strategy), (other, elsewhere) = MESHES[source], MESHES[target]
    run_spmd(saves, world, Net, strategy, tmp_path)
    ranks = run_spmd(loads, other, Net, elsewhere, tmp_path / "a.ckpt", "64-true")
    (report, told), names = ranks[0], {*Net().state_dict()}
    assert told == [report.line()]
    assert all(said == [] for _, said in ranks[1:])
    assert (report.saved_on, report.loaded_on, report.form) == (source, target, "a directory")
    parts = {part.name: part for part in report.parts}
    assert {*parts["weights"].restored} == {*parts["optimizer 0 (AdamW)"].restored} == names
    assert parts["schedulers"].restored == ("0 (StepLR)",)
    assert parts["loops"].restored == ("epoch 0, step 2",)
    assert parts["random states"].restored == ("of 2 ranks",)
    assert len(parts["data position"].restored) + len(parts["data position"].converted) == 1
    assert "Keeps" in parts["callbacks"].unexpected
    assert not report.complete
    assert f"of {source}, on {target}: restored weights ({len(names)}), optimizer 0 (AdamW) ({len(names)})" in told[0]
    assert "not used: callbacks" in told[0]


def test_says_what_was_converted_edited_missing_and_left(tmp_path: Path) -> None:
    world, strategy = MESHES["pipeline 2"]
    run_spmd(saves, world, Partial, strategy, tmp_path)
    options: dict[str, Any] = {"callbacks": (EMAWeightAveraging, Keeps)}
    for target, (other, elsewhere) in {"pipeline 2": MESHES["pipeline 2"], "one device": (1, {})}.items():
        report, told = run_spmd(loads, other, Edits, elsewhere, tmp_path / "a.ckpt", "32-true", **options)[0]
        weights = report.part("weights")
        assert weights is not None
        assert {*weights.edited} == {
            "blocks.0.up.bias",
            "blocks.1.down.bias",
            "strange",
            "blocks.1.up.bias taken out",
        }
        assert weights.converted == tuple(
            f"{name}: torch.float64 to torch.float32"
            for name in Net().state_dict()
            if name.startswith("blocks.") and name not in (*weights.edited, "blocks.1.up.bias")
        )
        assert weights.missing == ("blocks.1.up.bias", "head.weight", "head.bias")
        assert weights.unexpected == ("strange",)
        parts = {part.name: part for part in report.parts}
        assert parts["averaged weights"].missing == ("EMAWeightAveraging",)
        assert parts["callbacks"].restored == ("Keeps",)
        assert parts["entries for hooks"].restored == ("words",)
        expected = "rank 0's of 2" if other == 1 else "of 2 ranks"
        assert expected in (*parts["random states"].restored, *parts["random states"].converted)
        assert "missing: weights (blocks.1.up.bias; head.weight; head.bias)" in told[0]
        assert "not used: weights (strange)" in told[0], target


def test_tells_at_a_test_too(tmp_path: Path) -> None:
    run_spmd(saves, 2, Net, MESHES["tensor 2"][1], tmp_path)
    report, told = run_spmd(loads, 1, Net, {}, tmp_path / "a.ckpt", "64-true", test=True)[0]
    assert [part.name for part in report.parts] == ["weights", "structure"]
    assert told == [report.line()]


def refused(rank: int, world: int, strategy: dict[str, Any], path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loads(rank, world, Swapped, strategy, path, "64-true")
    return str(caught.value)


@pytest.mark.parametrize("target", ["pipeline 2", "data 2, zero 3"])
def test_layers_are_not_swapped_silently(target: str, tmp_path: Path) -> None:
    run_spmd(saves, 1, Net, {}, tmp_path)
    world, strategy = MESHES[target]
    for text in run_spmd(refused, world, strategy, tmp_path / "a.ckpt"):
        assert "stand in another order: blocks.0 is the Smooth that was saved as blocks.1" in text
    report, told = run_spmd(loads, world, SwappedOnPurpose, strategy, tmp_path / "a.ckpt", "64-true")[0]
    structure = report.part("structure")
    assert structure is not None
    assert structure.converted[0] == "blocks.0 is the Smooth that was saved as blocks.1"
    assert "converted: structure (blocks.0 is the Smooth" in told[0]


def goes_on_from_weights(rank: int, world: int, path: Path) -> None:
    options: dict[str, Any] = {"precision": "64-true", "steps": 2}
    run(rank, world, Net, {}, **options).lightning_module.trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(CheckpointError, match="holds weights but no optimizer state"):
        run(rank, world, Net, {}, **options, path=path)


def test_weights_alone_are_no_training_to_go_on_with(tmp_path: Path) -> None:
    run_spmd(goes_on_from_weights, 1, tmp_path / "a.ckpt")
