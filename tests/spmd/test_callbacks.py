"""All callbacks at once, on a mesh with three axes and on one device: what they show is what is known otherwise."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from lightning_3d.callbacks import Communication, MemoryMonitor, PipelineTimeline, Throughput
from lightning_3d.counters import CollectiveCounter, CollectiveTable
from lightning_3d.reference.gpt import GPT
from tests.parity.models import LENGTH, VOCABULARY, Batch, NextToken
from tests.spmd.fits import loader, share
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

WIDTH, LAYERS, SAMPLES, BATCHES, WINDOW = 32, 4, 8, 6, 2
PEAK = 1e9
CUBE: dict[str, Any] = {
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "tensor_parallel_size": 2,
    "num_microbatches": 2,
}
# Forward of a sequence: products with weights, and scores and values of attention; twice that in the backward.
FLOPS = 3 * (2 * LENGTH * (LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH) + LAYERS * 4 * LENGTH**2 * WIDTH)


class Shown(NextToken):
    """Shows its loss in the progress bar."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss


class Bar(TQDMProgressBar):
    """Lightning's bar, and what it has shown after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        self.shown.append(dict(self.get_metrics(trainer, pl_module)))


class Counted(Callback):
    """Counts the collectives of some batches, of which each is an optimizer step, once more."""

    def __init__(self, first: int, count: int) -> None:
        self.table: CollectiveTable | None = None
        self._batches = range(first, first + count)
        self._counter: CollectiveCounter | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._batches:
            strategy: Any = trainer.strategy
            self._counter = self._counter or CollectiveCounter(strategy.device_mesh)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if self._counter is not None and rest[-1] in self._batches:
            self._counter.__exit__(None, None, None)
            self.table = self._counter.table


@dataclass(frozen=True)
class Seen:
    """What a rank has seen of a training."""

    samples: float
    flops: float | None
    report: Any
    table: CollectiveTable | None
    bar: list[dict[str, Any]]
    lines: list[str]
    files: list[str]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(rank: int, world: int, folder: str) -> Seen:
    ranks = Ranks(world=world, strategy=CUBE)
    speed = Throughput(every_n_steps=WINDOW, tokens_per_sample=LENGTH, peak_flops=PEAK)
    sent, bar, counts, lines = Communication(at_batch=1, steps=2), Bar(), Counted(1, 2), _Lines()
    memory, timeline = MemoryMonitor(1e12, every_n_steps=2), PipelineTimeline(at_batch=4, dirpath=f"{folder}/{world}")
    # Before the bar, that it shows what was logged.
    callbacks: list[Any] = [*([counts] if world > 1 else []), speed, sent, memory, timeline, bar]
    trainer = ranks.trainer(*callbacks, use_distributed_sampler=False, enable_progress_bar=True)
    own = [share(batch, rank // 4, 2) for batch in tokens(BATCHES, SAMPLES)] if world > 1 else tokens(BATCHES, SAMPLES)
    logger = logging.getLogger("lightning_3d.callbacks")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        trainer.fit(Shown(GPT(VOCABULARY, WIDTH, LAYERS, 4, max_length=LENGTH)), loader(own))
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    files = [path.name for path in Path(folder, str(world)).glob("*")]
    return Seen(speed.samples, speed.sample_flops, sent.report, counts.table, bar.shown, lines.lines, files)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, list[Seen]]:
    folder = str(tmp_path_factory.mktemp("seen"))
    (alone,) = run_spmd(trained, 1, folder, timeout=60)
    return alone, run_spmd(trained, 8, folder, timeout=180)


def test_samples_and_operations_count_once_on_any_mesh(seen: tuple[Seen, list[Seen]]) -> None:
    alone, ranks = seen
    for each in (alone, *ranks):
        assert each.samples == SAMPLES * (BATCHES - 1)
        assert each.flops == FLOPS


def test_rank_0_alone_prints(seen: tuple[Seen, list[Seen]]) -> None:
    alone, ranks = seen
    assert all(each.lines == [] for each in ranks[1:])
    for each in (alone, ranks[0]):
        speeds = [line for line in each.lines if "tokens/s" in line]
        assert [line.split("  ")[0] for line in speeds] == ["step 2", "step 4", "step 6", f"trained to step {BATCHES}"]
        for line in speeds:
            assert all(words in line for words in ("  loss ", " samples/s", "FLOP/s a device", "MFU "))
    assert any(line.startswith("communication in an optimizer step, the mean of 2") for line in ranks[0].lines)
    assert any(line.startswith("measured, ") for line in ranks[0].lines)
    assert "no communication to count: there is one process" in alone.lines


def test_the_bar_shows_the_loss_of_one_device_and_the_speed(seen: tuple[Seen, list[Seen]]) -> None:
    alone, ranks = seen
    expected = [metrics["loss"] for metrics in alone.bar]
    assert len(expected) == BATCHES
    assert [metrics["loss"] for metrics in ranks[0].bar] == pytest.approx(expected, abs=1e-9)
    for each in (alone, ranks[0]):
        assert [metrics.get("tokens/s", 0) > 0 for metrics in each.bar] == [False, *[True] * (BATCHES - 1)]


def test_every_call_and_byte_is_reported(seen: tuple[Seen, list[Seen]]) -> None:
    ranks = seen[1]
    report = ranks[0].report
    assert len({str(each.report) for each in ranks}) == 1
    assert report.tables == tuple(each.table for each in ranks)
    values = report.values(0)
    # Two blocks and the root of the stage, once in a step of two; and a hidden state for each micro-batch.
    assert values["communication/data_parallel/reduce_scatter_calls"] == 3
    assert values["communication/pipeline_parallel/send_calls"] == CUBE["num_microbatches"]
    state = SAMPLES // 2 * LENGTH * WIDTH * 8
    assert values["communication/pipeline_parallel/send_bytes"] == state
    assert report.most_sent("send", "pipeline_parallel") == state


def test_the_timeline_is_written_where_there_is_a_pipeline(seen: tuple[Seen, list[Seen]]) -> None:
    alone, ranks = seen
    assert alone.files == []
    assert "timeline.txt" in ranks[0].files


def without_batches(rank: int, world: int) -> float | None:
    speed = Throughput()
    trainer = Ranks(world=world).trainer(speed)
    with warnings.catch_warnings():
        # Lightning's own word about it.
        warnings.filterwarnings("ignore", message=r"Total length of .* is zero")
        trainer.fit(Shown(GPT(VOCABULARY, WIDTH, LAYERS, 4, max_length=LENGTH)), loader([]))
    return speed.sample_flops


def test_no_batch_to_count_with_is_no_error() -> None:
    assert run_spmd(without_batches, 1, timeout=60) == [None]
