"""One real step of a pipeline in time: which rank computed what when, beside what the schedule would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.log import get_logger
from lightning_3d.parallel.pipeline.report import StepTimelines
from lightning_3d.strategy import Mesh3DStrategy

_log = get_logger(__name__)


class PipelineTimeline(Callback):
    """Times the stages of the pipeline in one training step, and writes measured and theoretical timeline.

    Text goes to the log and to ``timeline.txt``, a picture to ``timeline.png`` if matplotlib is there. They show the
    pipeline of rank 0.

    Args:
        at_batch: How many training batches come before it; the first ones do more than others.
        dirpath: Folder of the files; None = the Trainer's ``default_root_dir``.
        width: Characters of the text.

    Raises:
        ConfigError: A number is below 0, or the text has no width.
    """

    def __init__(self, at_batch: int = 5, dirpath: str | None = None, width: int = 120) -> None:
        if at_batch < 0 or width < 1:
            raise ConfigError(
                f"PipelineTimeline(at_batch={at_batch}, width={width}) shows no step.",
                valid="at_batch of at least 0, width of at least 1",
            )
        self.at_batch = at_batch
        self.width = width
        self._dirpath = dirpath
        self._strategy: Mesh3DStrategy | None = None
        self._before = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        self._strategy, self._before = None, self.at_batch
        if isinstance(strategy, Mesh3DStrategy) and strategy.mesh_spec.pipeline > 1:
            self._strategy = strategy
        elif trainer.is_global_zero:
            _log.info("no timeline: there is no pipeline, which Mesh3DStrategy(pipeline_parallel_size=2) has")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._strategy is not None and self._before == 0:
            self._strategy.start_pipeline_timeline()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        strategy = self._strategy
        if strategy is not None and self._before == 0:
            self._strategy = None
            times = strategy.stop_pipeline_timeline()
            if trainer.is_global_zero:
                self._write(times, Path(self._dirpath or trainer.default_root_dir))
        self._before -= 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is not None and trainer.is_global_zero:
            _log.info("no timeline: training ended before its batch %d, PipelineTimeline(at_batch=...)", self.at_batch)

    def _write(self, times: StepTimelines, folder: Path) -> None:
        text = times.text(self.width)
        _log.info("%s", text)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.txt").write_text(f"{text}\n")
        try:
            times.save_png(folder / "timeline.png")
        except ConfigError as error:
            # A picture less is no reason to end a training.
            _log.info("no timeline.png: %s", error)
            return
        _log.info("timeline %s", folder / "timeline.png")
