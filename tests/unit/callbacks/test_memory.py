"""Memory while training is told beside what was predicted."""

import resource
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_3d.callbacks import MemoryMonitor
from lightning_3d.errors import ConfigError


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(dict(metrics))


def below_the_peak() -> int:
    """How far this process is below the most memory that it ever had, which earlier tests have taken."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - pages * resource.getpagesize()


class Grows(BoringModel):
    """Takes memory in its first step and keeps it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not hasattr(self, "kept"):
            self.kept = torch.ones((64 * 2**20 + below_the_peak()) // 4)
        return super().training_step(batch, batch_idx)


def fitted(monitor: MemoryMonitor, steps: int = 4) -> Kept:
    kept = Kept()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=kept,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Grows())
    kept.rows = [row for row in kept.rows if "memory/measured_bytes" in row]
    return kept


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts memory as Linux tells it")
def test_measured_and_predicted_are_logged() -> None:
    monitor = MemoryMonitor(predicted_bytes=64 * 2**20, every_n_steps=2)
    rows = fitted(monitor).rows
    assert len(rows) == 2
    assert rows[-1]["memory/predicted_bytes"] == 64 * 2**20
    assert rows[-1]["memory/measured_bytes"] == monitor.measured_bytes >= 32 * 2**20
    assert rows[-1]["memory/measured_to_predicted"] == monitor.measured_bytes / (64 * 2**20)


def test_more_than_predicted_is_told_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fitted(MemoryMonitor(predicted_bytes=[1024.0], every_n_steps=1))
    assert sum("1.00 KiB predicted" in record.message for record in caplog.records) == 1
    assert any(record.message.startswith("memory of rank 0: ") for record in caplog.records)


def test_every_rank_tells_of_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 3)
    monitor = MemoryMonitor()
    monitor.measured_bytes = 2048
    for _ in range(2):
        monitor._tell(1024.0, rank=3)
    assert [record.message for record in caplog.records] == [
        "memory of rank 3: 2.00 KiB measured, 1.00 KiB predicted (+100%)"
    ]


@pytest.mark.parametrize("options", [{"predicted_bytes": 0}, {"predicted_bytes": [1, -1]}, {"every_n_steps": 0}])
def test_impossible_values(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MemoryMonitor(**options)


def test_one_prediction_for_each_pipeline_rank() -> None:
    with pytest.raises(ConfigError, match="0 predictions"):
        fitted(MemoryMonitor(predicted_bytes=[], every_n_steps=1))
