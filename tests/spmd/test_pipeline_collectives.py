"""What a batch sends on a mesh with three axes, counted through the Trainer: to the byte what the prices say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.counters import CollectiveCounter
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.data.cost import data_sizes, data_traffic, stage_share
from lightning_3d.parallel.pipeline.cost import pipeline_traffic
from lightning_3d.parallel.tensor.cost import Sums, tensor_traffic
from lightning_3d.plan import Plan
from lightning_3d.reference.gpt import GPT
from tests.parity.models import LENGTH, VOCABULARY, NextToken
from tests.spmd.fits import loader
from tests.spmd.pool import run_spmd
from tests.spmd.sums import dense_block, vocabulary
from tests.spmd.tensor_runs import Ranks, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

WIDTH, SAMPLES, MICROBATCHES, DEGREE = 32, 2, 4, 2
# Bytes of the hidden state of a micro-batch in fp64, and the tokens that have a next one.
STATE, ROWS = SAMPLES * LENGTH * WIDTH * 8, SAMPLES * (LENGTH - 1)
DATA, PIPELINE, TENSOR = "data_parallel", "pipeline_parallel", "tensor_parallel"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training on 2 x 2 x 2 ranks."""

    schedule: str
    zero: int
    recompute: str = "none"

    @property
    def strategy(self) -> dict[str, Any]:
        return {
            **{f"{axis}_size": DEGREE for axis in (DATA, PIPELINE, TENSOR)},
            "num_microbatches": MICROBATCHES,
            "pipeline_schedule": self.schedule,
            "zero_stage": self.zero,
            "activation_checkpointing": self.recompute,
        }


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a batch sends by the prices of the axes.

    Attributes:
        case: The training.
        plan: Its plan.
        rank: A pipeline rank.
    """

    case: Case
    plan: Plan
    rank: int

    @property
    def rows(self) -> set[str]:
        """As texts."""
        pipeline = self.plan.pipeline
        assert pipeline is not None
        sent = pipeline_traffic(pipeline, rank=self.rank, microbatches=MICROBATCHES)
        total = sent + tensor_traffic(self._sums(), size=DEGREE, microbatches=MICROBATCHES) + self._data()
        return {str(row) for row in total.rows}

    def _sums(self) -> Iterator[Sums]:
        pipeline = self.plan.pipeline
        assert pipeline is not None
        for stage in pipeline.stages_of(self.rank):
            yield from [dense_block(STATE, recomputed=self.case.recompute == "full")] * stage.layers
            if stage.index == 0:
                yield Sums(forward=1, backward=0, payload=STATE)
            if stage.index == len(pipeline.stages) - 1:
                yield Sums(forward=0, backward=1, payload=STATE)
                yield from vocabulary(STATE, ROWS, element=8)[1:]

    def _data(self) -> Traffic:
        pipeline = self.plan.pipeline
        assert pipeline is not None
        # The number of micro-batches and of new kinds, that data ranks agree on. What is logged meets after the step.
        total = Traffic(
            rows=(TrafficRow(operation="all_reduce", axis=DATA, group_size=DEGREE, calls=1, payload=2 * 8),)
        )
        managed: set[str] = set()
        here = {stage.index for stage in pipeline.stages_of(self.rank)}
        twice = {name for name, stages in pipeline.holders.items() if len(here & set(stages)) > 1}
        apart = {name for row in self.plan.parameters.rows if row.name in twice for name in row.names}
        for index in sorted(here):
            held = {name for name, stages in pipeline.holders.items() if index in stages}
            modules = [name for name, stages in pipeline.modules.items() if index in stages]
            table, plan = stage_share(
                self._local(), self.plan.data, managed=held - managed, modules=modules, apart=apart
            )
            managed |= held
            total += data_traffic(plan, data_sizes(table, plan, self.plan.mesh), microbatches=MICROBATCHES)
        return total

    def _local(self) -> ParameterTable:
        """The parameters as a tensor rank has them."""
        rows = []
        for row in self.plan.parameters.rows:
            shape, layout = list(row.shape), self.plan.layouts.get(row.name)
            if layout is not None:
                shape[layout.dim] //= DEGREE
            rows.append(replace(row, shape=tuple(shape)))
        return ParameterTable(rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank sent in a batch.

    Attributes:
        sent: Operation and axis to calls and bytes, as text.
        expected: What the prices say.
    """

    sent: dict[tuple[str, str], str]
    expected: set[str]

    @property
    def priced(self) -> set[str]:
        """What was sent of what has a price."""
        return {text for (operation, axis), text in self.sent.items() if axis in (DATA, TENSOR) or operation == "send"}


class Counted(Callback):
    """Counts the collectives of a batch that comes after all recordings, from its step to its gradients."""

    def __init__(self, case: Case) -> None:
        self.found: Found | None = None
        self._case = case
        self._counter: CollectiveCounter | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            strategy: Any = trainer.strategy
            self._counter = CollectiveCounter(strategy.device_mesh)
            self._counter.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        rows, self._counter = self._counter.table.rows, None
        strategy: Any = trainer.strategy
        rank = strategy.device_mesh.get_local_rank(PIPELINE)
        expected = Expected(case=self._case, plan=strategy._module_on_mesh.plan, rank=rank)
        self.found = Found(sent={(row.operation, row.axis): _as_priced(row) for row in rows}, expected=expected.rows)


def _as_priced(row: Any) -> str:
    fields = {name: getattr(row, name) for name in TrafficRow.__slots__}
    return str(TrafficRow(**fields))


def counted(rank: int, world: int, cases: tuple[Case, ...]) -> list[Found | None]:
    return [_counted(world, case) for case in cases]


def _counted(world: int, case: Case) -> Found | None:
    counts = Counted(case)
    trainer = Ranks(world=world, strategy=case.strategy).trainer(counts, use_distributed_sampler=False)
    trainer.fit(NextToken(GPT(VOCABULARY, WIDTH, 4, 4, max_length=LENGTH)), loader(tokens(4, MICROBATCHES * SAMPLES)))
    return counts.found


RECOMPUTED = Case(schedule="1f1b", zero=1, recompute="full")
CASES = (
    RECOMPUTED,
    Case(schedule="1f1b", zero=0),
    Case(schedule="gpipe", zero=2),
    Case(schedule="interleaved1f1b", zero=3, recompute="full"),
    Case(schedule="zbvzerobubble", zero=1),
)


@pytest.fixture(scope="module")
def ranks() -> list[list[Found]]:
    found: list[list[Found]] = run_spmd(counted, DEGREE**3, CASES, timeout=200)
    return found


def test_a_batch_sends_what_the_prices_say(ranks: list[list[Found]]) -> None:
    for rank, found in enumerate(ranks):
        for case, of_case in zip(CASES, found, strict=True):
            assert of_case.priced == of_case.expected, f"rank {rank}, {case}"


def test_calls_are_as_few_as_the_papers_have(ranks: list[list[Found]]) -> None:
    calls = {key: int(text.split()[3]) for key, text in ranks[0][CASES.index(RECOMPUTED)].sent.items()}
    # Two blocks: 2 sums forward, 2 backward and 1 of the recomputation, and the embedding's, for each micro-batch.
    assert calls["all_reduce", TENSOR] == MICROBATCHES * (2 * (2 + 2 + 1) + 1)
    # Two blocks and the root of the stage, once in a batch.
    assert calls["all_gather", DATA] == calls["reduce_scatter", DATA] == 3
    assert calls["send", PIPELINE] == MICROBATCHES
    # What the last stage tells of the step.
    assert calls["broadcast", PIPELINE] == 1
