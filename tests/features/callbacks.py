"""Features: callbacks, loggers and profilers of Lightning, on modules that nobody wrote for a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from tests.features import callback_programs as programs
from tests.features import hooks, monitors
from tests.features.here import CUBE, DATA_0, DATA_3, MESHES, PIPELINE, TENSOR
from tests.features.table import Feature

_WIDE: Any = {"force_terminal": True, "width": 200}
_BY_DATA = (DATA_0, DATA_3, CUBE)
_CUT = (DATA_3, TENSOR, PIPELINE, CUBE)

_STOPPING = (
    Feature(
        name="EarlyStopping on a validation metric",
        program=partial(programs.early_stopping, monitor="val_loss", patience=2),
        always=(CUBE,),
    ),
    Feature(
        name="EarlyStopping at the end of training epochs, mode max",
        program=partial(
            programs.early_stopping, monitor="train_loss", mode="max", patience=1, check_on_train_epoch_end=True
        ),
    ),
    Feature(
        name="EarlyStopping past a divergence threshold",
        program=partial(programs.early_stopping, monitor="val_loss", divergence_threshold=1.3, patience=5),
    ),
    Feature(name="Timer", program=programs.timer),
    Feature(name="SpikeDetection", program=programs.spikes),
)
_MONITORS = (
    Feature(name="LearningRateMonitor by step", program=partial(monitors.learning_rates, interval="step")),
    Feature(name="LearningRateMonitor by epoch", program=partial(monitors.learning_rates, interval="epoch")),
    Feature(
        name="ThroughputMonitor",
        program=monitors.throughput,
        always=(CUBE,),
        note="per second: of all data ranks; per device: that divided by all devices",
    ),
    Feature(name="DeviceStatsMonitor", program=monitors.device_stats),
    Feature(name="ModelSummary and RichModelSummary", program=monitors.summary),
)
_SEARCHES = (
    Feature(name="LearningRateFinder", program=programs.learning_rate_finder, always=(CUBE,)),
    Feature(name="Tuner.lr_find", program=programs.tuner),
    Feature(
        name="BatchSizeFinder",
        program=programs.batch_size_finder,
        refused={mesh.name: "BatchSizeFinder enlarges the batch until memory runs out" for mesh in MESHES},
    ),
    Feature(
        name="Tuner.scale_batch_size",
        program=programs.scale_batch_size,
        refused={mesh.name: "BatchSizeFinder enlarges the batch" for mesh in (TENSOR, PIPELINE)}
        | {mesh.name: "not supported with distributed strategies" for mesh in _BY_DATA},
    ),
    Feature(
        name="ModelPruning",
        program=programs.pruning,
        refused={mesh.name: "ModelPruning puts a masked copy in the place of each parameter" for mesh in _CUT},
        note="where each rank holds all parameters",
    ),
)
_OTHERS = (
    Feature(name="BasePredictionWriter", program=programs.prediction_writer, always=(CUBE,)),
    Feature(name="LambdaCallback", program=programs.lambdas),
    Feature(name="trainer.strategy in callbacks", program=programs.strategy_in_callbacks, always=(CUBE,)),
    Feature(name="register_hook of parameters", program=programs.gradient_hooks, always=(DATA_3,)),
    Feature(name="order of all hooks", program=hooks.order, always=(CUBE,)),
    Feature(name="order of all hooks in a resumed run", program=hooks.order_when_resumed),
)
_LOGGERS = (
    Feature(name="CSVLogger", program=monitors.csv_logger, always=(CUBE,)),
    Feature(name="several loggers, and self.logger in hooks", program=monitors.logger_in_hooks),
    Feature(name="logger.watch of gradients", program=monitors.watch),
    Feature(name="TQDMProgressBar", program=partial(monitors.progress_bar, kind=TQDMProgressBar)),
    Feature(
        name="RichProgressBar",
        program=partial(monitors.progress_bar, kind=RichProgressBar, leave=True, console_kwargs=_WIDE),
    ),
    Feature(name="profiler simple", program=monitors.simple_profiler),
    Feature(name="profiler advanced", program=monitors.advanced_profiler),
    Feature(name="profiler pytorch", program=monitors.pytorch_profiler),
)

FEATURES: tuple[Feature, ...] = _STOPPING + _MONITORS + _SEARCHES + _OTHERS + _LOGGERS
