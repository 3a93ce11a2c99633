"""What lives on the ranks of a pipeline in a real step: activations of as many micro-batches as the schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_3d.counters import LiveBytes
from lightning_3d.reference.gpt import GPT
from tests.parity.models import VOCABULARY, Learner, NextToken
from tests.spmd.fits import loader, normal
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

RANKS, SAMPLES, WIDTH, INNER, LENGTH = 2, 32, 8, 256, 64


class Block(nn.Module):
    """Narrow between blocks and wide inside, so that what waits for backward is not what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Wide(Learner):
    """Four blocks, two on each stage."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Block() for _ in range(4))))

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.model(batch[0]).square().mean()


# What a stage of two blocks keeps of a micro-batch: what tanh gave, which both of its neighbours need.
ACTIVATIONS = 2 * SAMPLES * LENGTH * INNER * 8


class Peak(Callback):
    """The most bytes that live in the third step beyond those before it."""

    def __init__(self) -> None:
        self.size = 0
        self._live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._live = LiveBytes()
            self._live.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.size, self._live = self._live.peak.size, None


def peak(module: LightningModule, batch: Tensor, **strategy: Any) -> int:
    live = Peak()
    ranks = Ranks(world=RANKS, strategy={"tensor_parallel_size": 1, "pipeline_parallel_size": RANKS})
    ranks.trainer(live, strategy=strategy).fit(module, loader([(batch,)] * 3))
    return live.size


def in_flight(rank: int, world: int, schedule: str) -> list[float]:
    """Peaks of some numbers of micro-batches, in what a stage keeps of one."""
    return [
        peak(Wide(), normal(1, count * SAMPLES, LENGTH, WIDTH), num_microbatches=count, pipeline_schedule=schedule)
        / ACTIVATIONS
        for count in (4, 8)
    ]


def test_gpipe_holds_all_microbatches_and_1f1b_one_for_each_later_stage() -> None:
    gpipe, ahead = run_spmd(in_flight, RANKS, "gpipe"), run_spmd(in_flight, RANKS, "1f1b")
    for rank in range(RANKS):
        four, eight = gpipe[rank]
        assert eight - four == pytest.approx(4, abs=0.5), "gpipe holds four micro-batches more"
        assert four - ahead[rank][0] == pytest.approx(4 - (RANKS - rank), abs=0.5)
        assert ahead[rank][1] - ahead[rank][0] < 0.5, "1f1b holds as many however many there are"


def recomputing(rank: int, world: int) -> list[int]:
    torch.manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (16, LENGTH))
    return [
        peak(
            NextToken(GPT(VOCABULARY, 32, 8, 4, max_length=LENGTH, dropout=0.1)),
            ids,
            num_microbatches=4,
            activation_checkpointing=kind,
        )
        for kind in ("none", "selective", "full")
    ]


def test_recomputation_keeps_less() -> None:
    for none, selective, full in run_spmd(recomputing, RANKS):
        # What is computed again lives for one block at a time.
        assert none > 1.2 * selective
        assert selective > 1.2 * full
