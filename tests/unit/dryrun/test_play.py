"""Dry runs of small trainings: what is played stands for all, and what cannot be played is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.counters import Category
from lightning_3d.dryrun import DryRunReport, Training, dry_run, representatives
from lightning_3d.dryrun.memory import FakeMemory
from lightning_3d.dryrun.planned import enough_microbatches
from lightning_3d.errors import ModuleError
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.shapes import DecoderShape
from lightning_3d.reference.gpt import GPT
from tests.marks import more
from tests.parity.models import VOCABULARY, NextToken

WIDTH, LAYERS, SAMPLES = 32, 4, 12


class Blocks(L.LightningModule):
    """A stack of layers and a loss."""

    def __init__(self, automatic: bool = True, kind: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        self.log("train_loss", batch.mean())
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.kind(self.parameters(), lr=0.1)
        return optimizer


def training(data: int = 1, pipeline: int = 1, make: Any = Blocks, **strategy: Any) -> Training:
    config = StrategyConfig(data_parallel_size=data, pipeline_parallel_size=pipeline, **strategy).check()
    mesh = MeshSpec(data=data, pipeline=pipeline, tensor=1)
    return Training(make=make, batch=torch.ones(SAMPLES, WIDTH), mesh=mesh, config=config)


PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH * 4


def test_states_are_divided_by_the_data_ranks() -> None:
    whole, cut = (dry_run(training(data, zero_stage=3)).ranks[0].peak.categories for data in (1, 4))
    assert whole[Category.PARAMETER] == PARAMETERS
    assert cut[Category.PARAMETER] == PARAMETERS // 4
    assert whole[Category.OPTIMIZER] - cut[Category.OPTIMIZER] == 2 * PARAMETERS * 3 // 4


@pytest.mark.parametrize("blocks", [1, 2])
def test_padding_is_what_more_ranks_than_rows_hold(blocks: int) -> None:
    (rank,) = dry_run(training(64, zero_stage=3, unit_blocks=blocks)).ranks
    # 32 rows on 64 ranks: this one has a row of each weight and an element of each bias.
    assert rank.padding.stored == LAYERS * (WIDTH + 1) * 4
    assert rank.padding.share == pytest.approx(1.0)


def test_ddp_is_priced_and_its_buckets_stay() -> None:
    report = dry_run(training(4, zero_stage=0))
    (rank,) = report.ranks
    assert rank.traffic.payload("all_reduce", "data_parallel") >= PARAMETERS
    assert rank.between_steps >= 4 * PARAMETERS
    assert "DistributedDataParallel" in str(report)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [((4, 1), {"zero_stage": 3}), ((1, 4), {}), more((2, 2), {"zero_stage": 2}), more((2, 4), {"zero_stage": 3})],
)
def test_microbatches_that_are_not_played_are_counted(mesh: tuple[int, int], strategy: dict[str, Any]) -> None:
    one = training(*mesh, num_microbatches=12, **strategy)
    every_stage = [one.mesh.at(pipeline=rank) for rank in range(mesh[1])]
    played, whole = (dry_run(one, every_stage, all_microbatches=wanted).ranks for wanted in (False, True))
    for few, every in zip(played, whole, strict=True):
        assert few.traffic.rows == every.traffic.rows
        # The numbers of micro-batches and their losses.
        assert abs(few.peak.peak.size - every.peak.peak.size) <= 12 * 16
        assert few.between_steps == every.between_steps
        assert few.in_flight == every.in_flight


def test_enough_microbatches() -> None:
    four = StrategyConfig(pipeline_parallel_size=4)
    assert enough_microbatches(StrategyConfig(), 64, 0) == 3
    assert [enough_microbatches(four, 64, rank) for rank in range(4)] == [5, 4, 3, 3]
    assert enough_microbatches(four, 4, 0) == 4
    assert enough_microbatches(StrategyConfig(pipeline_parallel_size=4, pipeline_schedule="gpipe"), 64, 3) == 64


def test_selective_recomputation_keeps_no_partial_products() -> None:
    length, width = 64, 64
    state = length * width * 4
    peaks = []
    for layers in (4, 8):
        one = Training(
            make=partial(NextToken, GPT(VOCABULARY, width, layers, 4, max_length=length)),
            batch=[torch.zeros(1, length, dtype=torch.long)],
            mesh=MeshSpec(data=1, pipeline=1, tensor=2),
            config=StrategyConfig(
                data_parallel_size=1,
                tensor_parallel_size=2,
                activation_checkpointing="selective",
            ).check(),
        )
        (rank,) = dry_run(one).ranks
        peaks.append(sum(rank.peak.categories.get(each, 0) for each in (Category.OTHER, Category.COMMUNICATION)))
    # A block's input; then cut over features its queries, keys, values, what attention returns and the wide layer. What
    # the two summed products give would be two states more.
    assert (peaks[1] - peaks[0]) / 4 / state == pytest.approx(1 + (3 + 1 + 4) / 2, rel=0.1)


def test_representatives() -> None:
    assert [at.pipeline for at in representatives(MeshSpec(data=2, pipeline=8, tensor=2))] == [0, 1, 7]
    assert [at.pipeline for at in representatives(MeshSpec(data=2, pipeline=2, tensor=2))] == [0, 1]
    assert [at.pipeline for at in representatives(MeshSpec(data=2, pipeline=1, tensor=2))] == [0]


def test_samples_follow_the_step() -> None:
    (rank,) = dry_run(training(2, zero_stage=1), samples=20).ranks
    assert 15 <= len(rank.samples) <= 40
    assert max(sample.total for sample in rank.samples) <= rank.peak.peak.size
    assert rank.samples[0].phase.startswith("forward")
    assert rank.samples[-1].phase == "optimizer"


def test_the_report_as_text_and_as_data() -> None:
    report: DryRunReport = dry_run(training(2, 2, num_microbatches=4))
    assert "rank 1 at data 0 pipeline 1 tensor 0, stage 1" in str(report)
    data = report.as_data()
    assert data["mesh"] == {"data": 2, "pipeline": 2, "tensor": 1}
    assert [rank["peak_bytes"] for rank in data["ranks"]] == [rank.peak.peak.size for rank in report.ranks]


def test_what_the_planner_cannot_price_is_told_in_one_line() -> None:
    one_block = DecoderShape(layers=1, hidden=WIDTH, heads=1, kv_heads=1, ffn_hidden=WIDTH, vocab=8, sequence=8)
    report = dry_run(training(1, 2, num_microbatches=2), price=lambda: decoder_model(one_block))
    assert all(rank.beside is None for rank in report.ranks)
    (note,) = report.notes
    assert "1 blocks cannot fill 2 stages" in note
    assert len(note.splitlines()) == 1


def test_what_cannot_be_played() -> None:
    with pytest.raises(ModuleError, match="automatic_optimization=False"):
        dry_run(training(make=partial(Blocks, automatic=False)))
    with pytest.raises(ModuleError, match="LBFGS"):
        dry_run(training(make=partial(Blocks, kind=torch.optim.LBFGS)))


def test_small_known_values_stay_known_and_others_have_no_memory() -> None:
    with FakeMemory():
        mask = torch.ones(4, 4).tril().bool()
        assert bool(mask[1, 0])
        assert not bool(mask[0, 1])
        assert mask.nonzero().shape == (10, 2)
        hidden = torch.empty(1 << 40, dtype=torch.uint8)
        assert isinstance(hidden, FakeTensor)
        assert isinstance(torch.ones(1 << 34), FakeTensor)
        assert isinstance(hidden[:4] * torch.ones(4), FakeTensor)
