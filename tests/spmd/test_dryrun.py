"""Dry runs against real trainings of the same on gloo: the same collectives to the byte, the same peak."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.counters import CollectiveCounter, LiveBytes
from lightning_3d.dryrun import RankReport, Training, dry_run
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.reference.gpt import GPT
from tests.marks import more
from tests.parity.models import VOCABULARY, NextToken
from tests.spmd.fits import loader
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

WIDTH, LENGTH, SAMPLES, BATCHES = 64, 64, 8, 3
Rows = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        mesh: Data, pipeline and tensor ranks.
        zero: ZeRO stage.
        strategy: More arguments of the strategy.
    """

    mesh: tuple[int, int, int]
    zero: int
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """All arguments of the strategy."""
        data, pipeline, tensor = self.mesh
        return {
            "data_parallel_size": data,
            "pipeline_parallel_size": pipeline,
            "tensor_parallel_size": tensor,
            "zero_stage": self.zero,
            "num_microbatches": 4,
            **self.strategy,
        }

    @property
    def spec(self) -> MeshSpec:
        """Its degrees."""
        data, pipeline, tensor = self.mesh
        replicas = self.strategy.get("data_replicate_size", 1)
        return MeshSpec(data=data, pipeline=pipeline, tensor=tensor, data_replicate=replicas)


def model() -> NextToken:
    return NextToken(GPT(VOCABULARY, WIDTH, 4, 4, max_length=LENGTH))


def batches() -> list[Any]:
    return tokens(BATCHES, SAMPLES, LENGTH)


@contextmanager
def collected(_: Action) -> Iterator[None]:
    yield
    gc.collect()


class Measured(Callback):
    """What the last of some steps sends, and the most bytes that live in it."""

    def __init__(self) -> None:
        self.sent: Rows = {}
        self.peak = 0
        self._live = LiveBytes()
        self._counter: CollectiveCounter | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._live.__enter__()
        self._live.track(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCHES - 1:
            strategy: Any = trainer.strategy
            stages = strategy._module_on_mesh.engine.stages
            if stages is not None:
                stages.engine.watch(collected)
            # What only cycles keep is not counted: when it goes is up to Python.
            gc.collect()
            gc.freeze()
            self._live.rewind()
            self._counter = CollectiveCounter(strategy.device_mesh)
            self._counter.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            rows, self._counter = self._counter.table.rows, None
            self.sent = {(row.operation, row.axis): (row.calls, row.payload) for row in rows}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.peak = self._live.peak.size

    def on_train_end(self, *_: Any) -> None:
        gc.unfreeze()
        self._live.__exit__(None, None, None)


def trained(rank: int, world: int, cases: tuple[Case, ...]) -> list[tuple[Rows, int]]:
    return [_trained(world, case) for case in cases]


def _trained(world: int, case: Case) -> tuple[Rows, int]:
    measured = Measured()
    trainer = Ranks(world=world, strategy=case.options).trainer(measured, use_distributed_sampler=False)
    trainer.fit(model(), loader(batches()))
    return measured.sent, measured.peak


def played(case: Case) -> dict[int, RankReport]:
    config = StrategyConfig(**case.options).check()
    training = Training(make=model, batch=batches()[0], mesh=case.spec, config=config, precision="64-true")
    found = dry_run(training, [case.spec.coordinate(rank) for rank in (0, case.spec.world - 1)])
    return {rank.rank: rank for rank in found.ranks}


def of_model(sent: Rows, case: Case) -> Rows:
    """Without what the strategy talks about: how many micro-batches data ranks have, and what the last stage tells."""
    told = {("broadcast", "pipeline_parallel"), ("all_reduce", "world")}
    rows = {key: value for key, value in sent.items() if key not in told}
    data, pipeline, _ = case.mesh
    if pipeline > 1 and data > 1:
        calls, payload = rows["all_reduce", "data_parallel"]
        rows["all_reduce", "data_parallel"] = (calls - 1, payload - 16)
    return {key: value for key, value in rows.items() if value[0]}


# A replayed block frees what it computes again a little earlier than one that runs as it is, and dry runs play those.
UNREPLAYED = {"replay": False}
OTHERS = (
    Case((4, 1, 1), 0, {"num_microbatches": 1}),
    Case((4, 1, 1), 2, {"data_replicate_size": 2}),
    Case((2, 1, 2), 0),
    Case((2, 1, 2), 3, {**UNREPLAYED, "activation_checkpointing": "full"}),
    Case((2, 1, 2), 1, {"activation_checkpointing": "selective"}),
    Case((1, 2, 2), 1, {"pipeline_schedule": "gpipe"}),
    Case((2, 2, 1), 3, {"pipeline_schedule": "interleaved1f1b"}),
    Case((2, 2, 1), 2, {"pipeline_schedule": "zbvzerobubble"}),
)


def assert_alike(world: int, cases: tuple[Case, ...]) -> None:
    real = run_spmd(trained, world, cases, timeout=200)
    for index, case in enumerate(cases):
        for rank, found in played(case).items():
            sent, peak = real[rank][index]
            counted = {(row.operation, row.axis): (row.calls, row.payload) for row in found.traffic.rows}
            assert counted == of_model(sent, case), f"{case}, rank {rank}"
            assert found.peak.exact
            assert found.peak.peak.size == pytest.approx(peak, rel=0.02), f"{case}, rank {rank}\n{found}"


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (8, (Case((2, 2, 2), 1),)),
        (4, (Case((4, 1, 1), 3), Case((1, 4, 1), 1))),
        more(4, OTHERS),
    ],
    ids=["2x2x2", "data 4 and pipeline 4", "others"],
)
def test_figures_are_those_of_a_training(world: int, cases: tuple[Case, ...]) -> None:
    assert_alike(world, cases)
