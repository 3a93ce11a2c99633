from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import Mesh3DStrategy
from lightning_3d.callbacks import PipelineTimeline
from lightning_3d.errors import ConfigError
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.report import StepTimelines
from lightning_3d.parallel.pipeline.schedule.simulate import simulate

_LOGGER = "lightning_3d.callbacks.timeline"


class _Pipelined(Mesh3DStrategy):
    """Answers as a strategy on a pipeline does, without one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def mesh_spec(self) -> MeshSpec:
        return MeshSpec(data=1, pipeline=2, tensor=1)

    def start_pipeline_timeline(self) -> None:
        self.calls.append("start")

    def stop_pipeline_timeline(self) -> StepTimelines:
        self.calls.append("stop")
        played = simulate("1f1b", ranks=2, microbatches=2)
        return StepTimelines(measured=played, theoretical=played)


class _Run:
    """The hooks of a training of some batches, as the Trainer calls them."""

    is_global_zero = True

    def __init__(self, strategy: Any, directory: Path) -> None:
        self.strategy = strategy
        self.default_root_dir = str(directory)

    def train(self, callback: PipelineTimeline, batches: int) -> list[int]:
        """Returns in which batches the step was timed."""
        timed, trainer, module = [], self, BoringModel()
        callback.on_train_start(trainer, module)  # type: ignore[arg-type]
        for number in range(batches):
            before = len(self.strategy.calls)
            callback.on_train_batch_start(trainer, module, None, number)  # type: ignore[arg-type]
            callback.on_train_batch_end(trainer, module, None, None, number)  # type: ignore[arg-type]
            timed += [number] * (self.strategy.calls[before:] == ["start", "stop"])
        callback.on_train_end(trainer, module)  # type: ignore[arg-type]
        return timed


def _lines(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.name == _LOGGER)


@pytest.mark.parametrize("at_batch", [0, 2])
def test_one_step_is_timed_and_written(at_batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    run = _Run(_Pipelined(), tmp_path / "here")
    with caplog.at_level(logging.INFO, logger=_LOGGER):
        assert run.train(PipelineTimeline(at_batch=at_batch, width=18), 5) == [at_batch]
    assert run.strategy.calls == ["start", "stop"]
    text = (tmp_path / "here" / "timeline.txt").read_text()
    assert text.splitlines() == [
        "measured, 9.0 s: bubble 33.3%, micro-batches in flight 2 1",
        "rank 0  F0F1....B0- ..B1-",
        "rank 1  ..F0B0- F1B1- ....",
        "theoretical: bubble 33.3%, micro-batches in flight 2 1",
        "rank 0  F0F1....B0- ..B1-",
        "rank 1  ..F0B0- F1B1- ....",
    ]
    assert text.strip() in _lines(caplog)
    assert (tmp_path / "here" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_text_and_one_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.INFO, logger=_LOGGER):
        _Run(_Pipelined(), tmp_path).train(PipelineTimeline(at_batch=0, dirpath=str(tmp_path / "other")), 1)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["timeline.txt"]
    assert "no timeline.png: a picture needs matplotlib, which is not installed" in _lines(caplog)


def test_a_training_that_ends_before_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=_LOGGER):
        assert _Run(_Pipelined(), tmp_path).train(PipelineTimeline(at_batch=3), 3) == []
    assert "training ended before its batch 3" in _lines(caplog)


def test_other_strategies_have_no_timeline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PipelineTimeline(at_batch=0)],
    )
    with caplog.at_level(logging.INFO, logger=_LOGGER):
        trainer.fit(BoringModel())
    assert _lines(caplog).startswith("no timeline: there is no pipeline")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"at_batch": -1}, {"width": 0}])
def test_impossible_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="shows no step"):
        PipelineTimeline(**options)
