from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_3d.callbacks import Throughput
from lightning_3d.callbacks.throughput import _peak
from lightning_3d.errors import ConfigError

# A linear layer from 32 to 2 features: a product in the forward, two in the backward.
FLOPS = 3 * 2 * 32 * 2


class _Module(BoringModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss


class _Choosing(_Module):
    """Goes on only with values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if "nan" in str(self.layer.weight.detach().numpy()):
            raise ValueError("no numbers")
        return super().training_step(batch, batch_idx)


class _Convolved(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.conv(batch.view(-1, 3, 4, 8)[:, :, :, :]).square().mean())
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(8, 96), batch_size=2)  # type: ignore[arg-type]


def _train(module: LightningModule, folder: Path, callback: Throughput, **options: Any) -> Trainer:
    options = {"max_steps": 6, "limit_val_batches": 0, "logger": False, **options}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **options,
    )
    trainer.fit(module)
    return trainer


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.endswith("throughput")]


@pytest.mark.parametrize(("tokens", "unit"), [(None, "samples"), (8, "tokens")])
def test_prints_every_few_steps(
    tokens: int | None, unit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Throughput(every_n_steps=2, tokens_per_sample=tokens, peak_flops={"fp32": 1e9, "bf16": 4e9})
    with caplog.at_level(logging.INFO, logger="lightning_3d.callbacks.throughput"):
        trainer = _train(
            _Module(),
            tmp_path,
            callback,
            limit_val_batches=1,
            val_check_interval=3,
            logger=CSVLogger(tmp_path),
            log_every_n_steps=1,
        )
    lines = _lines(caplog)
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4", "step 6", "trained to step 6"]
    assert all(f" {unit}/s  " in line and "  loss " in line and "FLOP/s a device  MFU " in line for line in lines)
    assert callback.per_second > 0
    assert callback.samples == 5
    assert callback.sample_flops == FLOPS
    assert trainer.progress_bar_metrics[f"{unit}/s"] > 0
    assert trainer.logger is not None
    trainer.logger.save()
    (file,) = tmp_path.glob("**/metrics.csv")
    head, *rows = (line.split(",") for line in file.read_text().splitlines())
    (speeds, *_) = [row for row in (dict(zip(head, row, strict=True)) for row in rows) if row["mfu"]]
    speed = float(speeds["samples_per_second"])
    assert float(speeds["device_tflops"]) == pytest.approx(speed * FLOPS / 1e12)
    assert float(speeds["mfu"]) == pytest.approx(speed * FLOPS / 1e9)
    assert ("tokens_per_second" in speeds) == (tokens is not None)


def test_later_epochs_count_from_their_first_batch(tmp_path: Path) -> None:
    callback = Throughput(flops=False)
    _train(_Module(), tmp_path, callback, max_steps=-1, max_epochs=3, limit_train_batches=2)
    assert callback.samples == 3 * 2 - 1
    assert callback.sample_flops is None


def test_every_training_counts(tmp_path: Path) -> None:
    callback = Throughput()
    for _ in range(2):
        _train(_Module(), tmp_path, callback, max_steps=2)
        assert callback.sample_flops == FLOPS


def test_operations_of_manual_optimization_are_those_of_its_forward(tmp_path: Path) -> None:
    callback = Throughput()
    module = _Convolved()
    _train(module, tmp_path, callback, max_steps=2)
    assert callback.sample_flops == 3 * 2 * (3 * 9) * 4 * (4 * 8)


def test_a_step_that_needs_values_is_trained_without_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = Throughput(every_n_steps=1)
    with caplog.at_level(logging.INFO):
        _train(_Choosing(), tmp_path, callback, max_steps=2)
    assert callback.sample_flops is None
    assert sum("operations are not counted: " in record.message for record in caplog.records) == 1
    assert not any("FLOP/s" in line for line in _lines(caplog))


@pytest.mark.parametrize(
    ("given", "precision", "peak"),
    [
        (3e12, "bf16-mixed", 3e12),
        ({"bf16": 4.0, "fp32": 2.0}, "bf16-master", 4.0),
        ({"bf16": 4.0, "fp32": 2.0}, "16-true", 4.0),
        ({"bf16": 4.0, "fp32": 2.0}, "32-true", 2.0),
        ({"bf16": 4.0, "fp32": 2.0}, "64-true", None),
        (None, "32-true", None),
    ],
)
def test_the_peak_is_that_of_the_precision(given: Any, precision: str, peak: float | None) -> None:
    assert _peak(given, torch.device("cpu"), precision) == peak


def test_a_gpu_that_is_known_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    # A data sheet's figure for dense products (NVIDIA H100 SXM: 989 TFLOP/s in bf16).
    assert _peak({"bf16": 1.0}, torch.device("cuda"), "bf16-mixed") == pytest.approx(989e12, rel=0.01)
    assert _peak(5.0, torch.device("cuda"), "bf16-mixed") == 5.0


@pytest.mark.parametrize(("given", "shown"), [({"fp32": 1.0, "bf16": 1e9}, False), (1.0, True)])
def test_there_is_no_mfu_by_the_peak_of_another_device(
    given: Any, shown: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A device does not exceed its own; a number that the user has given is theirs."""
    callback = Throughput(every_n_steps=2, peak_flops=given)
    with caplog.at_level(logging.INFO, logger="lightning_3d.callbacks.throughput"):
        _train(_Module(), tmp_path, callback)
    told = [line for line in _lines(caplog) if line.startswith("no MFU: a device does ")]
    speeds = [line for line in _lines(caplog) if line not in told]
    assert len(told) == (not shown)
    assert all("with 1.0 FLOP/s, is of another one" in line for line in told)
    assert len(speeds) == 4
    assert all("FLOP/s a device" in line and ("MFU" in line) == shown for line in speeds)


@pytest.mark.parametrize(
    "options", [{"every_n_steps": 0}, {"tokens_per_sample": -1}, {"peak_flops": 0}, {"peak_flops": {"bf16": -1.0}}]
)
def test_impossible_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="measures nothing"):
        Throughput(**options)
