"""Programs that show what monitors, loggers, progress bars and profilers tell."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_summary import summarize

from tests.features.here import Here
from tests.features.modules import WIDTH, Data, Module, metrics, weights
from tests.features.table import Seen


class Rows(Logger):
    """Keeps on rank 0 what it is given, as loggers do that write somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyper_parameters: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        self.hyper_parameters.update(params)

    @rank_zero_only
    def watch(self, module: LightningModule) -> None:
        """Looks at gradients as they come, as hosted loggers do."""
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: self.rows.append((None, {"norm": float(gradient.norm())})))

    def told(self, trainer: Trainer) -> Seen:
        """Returns on every rank what rank 0 was given, and whether the others were given nothing."""
        return {
            "rows": trainer.strategy.broadcast(self.rows),
            "hyper-parameters": trainer.strategy.broadcast(self.hyper_parameters),
            "others are silent": trainer.is_global_zero or not self.rows,
        }


# ---- monitors ----


class Scheduled(Module):
    """Two groups of parameters with momentum, under a scheduler."""

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1, "name": "decayed"}, {"params": others, "name": "others"}]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.8)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rates(here: Here, interval: Any) -> Seen:
    monitor, logger = LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True), Rows()
    trainer = here.trainer(monitor, logger=logger, max_epochs=2)
    trainer.fit(Scheduled(), Data(here))
    return {
        "rates": monitor.lrs,
        "momentum": monitor.last_momentum_values,
        "decay": monitor.last_weight_decay_values,
        "metrics": metrics(trainer),
        **logger.told(trainer),
    }


class Counted(Module):
    """Says how much its batches cost."""

    flops_per_batch = 0


def throughput(here: Here) -> Seen:
    monitor, logger = (
        ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), window_size=3),
        Rows(),
    )
    trainer, module = here.trainer(monitor, logger=logger), Counted()
    module.flops_per_batch = 1000 // here.mesh.data
    trainer.fit(module, Data(here))
    told: dict[str, Any] = {}
    if trainer.is_global_zero:
        shown = [row for _, row in logger.rows if "train/device/samples_per_sec" in row][-1]
        times = monitor._throughputs[RunningStage.TRAINING]._time
        told = _work(shown, times[-1] - times[0], here.mesh.world, here.mesh.data)
    return {
        "work": trainer.strategy.broadcast(told),
        "others are silent": trainer.is_global_zero or not logger.rows,
    }


def _work(shown: Mapping[str, float], seconds: float, devices: int, data: int) -> dict[str, Any]:
    """The work of a window: what all devices did, as they say together and as each says of itself."""
    work: dict[str, Any] = {}
    for unit in ("samples", "items", "flops", "batches"):
        share = data if unit == "batches" else 1
        each = shown[f"train/device/{unit}_per_sec"] * devices
        every = shown.get(f"train/{unit}_per_sec", each)
        work[unit] = [each * seconds / share, every * seconds / share]
    return work


class Measured(CPUAccelerator):
    """A CPU with a gauge."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"gauge": 7.0}


def device_stats(here: Here) -> Seen:
    logger = Rows()
    trainer = here.trainer(DeviceStatsMonitor(cpu_stats=True), logger=logger, accelerator=Measured())
    trainer.fit(Module(), Data(here))
    return logger.told(trainer)


class Shown(Module):
    """With an example input and one parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, WIDTH, dtype=torch.float64)
        self.net.head.bias.requires_grad_(False)


class Counts(Callback):
    """Counts in a hook, on every rank."""

    text = ""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.example_input_array, example = None, pl_module.example_input_array
        self.text = str(summarize(pl_module, max_depth=-1))
        pl_module.example_input_array = example


def summary(here: Here) -> Seen:
    counts, plain, rich = Counts(), io.StringIO(), io.StringIO()
    handler, log = logging.StreamHandler(plain), logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    trainer = here.trainer(counts, ModelSummary(max_depth=3), RichModelSummary(max_depth=2), max_steps=1)
    with contextlib.redirect_stdout(rich):
        trainer.fit(Shown(), Data(here))
    log.removeHandler(handler)
    return {
        "counts": _table(counts.text),
        "plain": trainer.strategy.broadcast(_table(plain.getvalue())),
        "rich": trainer.strategy.broadcast(_table(rich.getvalue())),
        "others are silent": trainer.is_global_zero or not (plain.getvalue() or rich.getvalue()),
    }


def _table(text: str) -> list[str]:
    """The cells of a table; torch gives layers that it shards another name of its own."""
    return re.findall(r"[^\s|│┃─━-]+", text.replace("FSDP", ""))


# ---- loggers ----


def csv_logger(here: Here) -> Seen:
    logger = CSVLogger(here.directory, name="runs", flush_logs_every_n_steps=1)
    trainer, module = here.trainer(logger=logger, max_epochs=2), Module()
    trainer.fit(module, Data(here))
    trainer.test(module, Data(here), verbose=False)
    trainer.strategy.barrier()
    files = sorted(str(file.relative_to(here.directory)) for file in here.directory.rglob("*") if file.is_file())
    with (here.directory / "runs" / "version_0" / "metrics.csv").open() as file:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    return {
        "files": files,
        "rows": rows,
        "hyper-parameters": (here.directory / "runs" / "version_0" / "hparams.yaml").read_text(),
        "directory": str(trainer.log_dir).removeprefix(str(here.directory)),
    }


class Talks(Module):
    """Reaches for its loggers in hooks, on every rank."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"batch": batch_idx}, step=self.global_step)

    def on_train_epoch_end(self) -> None:
        assert self.logger is not None
        self.logger.log_hyperparams({"epochs": self.current_epoch})
        for logger in self.loggers:
            logger.log_metrics({"loss_of_epoch": float(self.trainer.callback_metrics["val_loss"])})


def logger_in_hooks(here: Here) -> Seen:
    first, second = Rows(), Rows()
    trainer = here.trainer(logger=[first, second], max_epochs=2, log_every_n_steps=3)
    trainer.fit(Talks(), Data(here))
    return {"first": first.told(trainer), "second": second.told(trainer)}


def watch(here: Here) -> Seen:
    logger, module = Rows(), Module()
    logger.watch(module)
    trainer = here.trainer(logger=logger)
    trainer.fit(module, Data(here))
    watched = any("norm" in row for _, row in logger.rows)
    return {"watched": trainer.strategy.broadcast(watched), "weights": weights(trainer)}


# ---- progress bars and profilers ----


def progress_bar(here: Here, kind: type[ProgressBar], **options: Any) -> Seen:
    bar, shown = kind(**options), io.StringIO()
    trainer, module = here.trainer(bar, max_epochs=2, enable_progress_bar=True), Module()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, Data(here))
        values = dict(trainer.progress_bar_metrics)
        trainer.validate(module, Data(here), verbose=False)
        trainer.predict(module, Data(here))
    # What stands there last; in between a bar need not show every value.
    found = re.findall(r"(train_loss_step|train_loss_epoch|val_loss)(?:=|: *)([0-9.]+)", shown.getvalue())
    return {
        "values": values,
        "shown": trainer.strategy.broadcast(dict(sorted(dict(found).items()))),
        "others are silent": trainer.is_global_zero or not shown.getvalue(),
    }


def simple_profiler(here: Here) -> Seen:
    profiler = SimpleProfiler()
    here.trainer(profiler=profiler).fit(Module(), Data(here))
    # A mesh asks for its first loader before it makes its plan, and is given the same once more.
    spans = {_span(name): len(times) for name, times in profiler.recorded_durations.items()}
    return {"spans": sorted(span for span in spans.items() if "dataloader" not in span[0] or "next" in span[0])}


def advanced_profiler(here: Here) -> Seen:
    profiler = AdvancedProfiler(dirpath=here.directory, filename="profile")
    trainer = here.trainer(profiler=profiler)
    trainer.fit(Module(), Data(here))
    suffix = "" if trainer.world_size == 1 else f"-{trainer.local_rank}"
    report = (here.directory / f"fit-profile{suffix}.txt").read_text()
    titles = [line for line in report.splitlines() if line.startswith("Profile stats for")]
    return {"spans": sorted(re.sub(r" rank: \d+$", "", _span(title)) for title in titles)}


class Spans(PyTorchProfiler):
    """Keeps the names of Lightning's spans; those of layers are on the rank that runs them."""

    names: frozenset[str] = frozenset()

    def summary(self) -> str:
        text = super().summary()
        self.names = frozenset(
            event.name for event in self.function_events or () if event.name.startswith("[pl][profile]")
        )
        return text


def pytorch_profiler(here: Here) -> Seen:
    profiler = Spans(dirpath=here.directory, filename="trace", export_to_chrome=False)
    here.trainer(profiler=profiler).fit(Module(), Data(here, samples=48))
    return {"spans": sorted(map(_span, profiler.names))}


def _span(name: str) -> str:
    """A span; torch gives a module that it shards another name."""
    return re.sub(r"(SingleDevice|Mesh3D)Strategy", "Strategy", name).replace("FSDPModule", "Module")
