"""The price of the data axis against real trainings: collectives to the byte, live bytes within 1 %."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.cost import Footprint, Traffic, TrafficRow
from lightning_3d.counters import Category, CollectiveCounter, LiveBytes, Owners
from lightning_3d.parallel.data.cost import Moment, data_footprint, data_sizes, data_traffic
from tests.parity.models import Learner, NextToken
from tests.spmd.fits import Fit, assert_equal_to_one_device, loader, normal, trainer
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

LAYERS, WIDTH, VOCABULARY, LENGTH = 4, 32, 32, 4
DATA = "data_parallel"
KINDS = {
    "parameters": (Category.PARAMETER,),
    "gathered_parameters": (Category.GATHERED_PARAMETER,),
    "gradients": (Category.GRADIENT,),
    "gathered_gradients": (Category.GATHERED_GRADIENT,),
    "optimizer": (Category.OPTIMIZER,),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; every dim 0 divides by four unless the vocabulary says otherwise."""

    zero: int
    microbatches: int = 1
    accumulate: int = 1
    precision: str = "32-true"
    vocabulary: int = VOCABULARY
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Found:
    """What one rank did, and what it should have done."""

    counted: set[tuple[Any, ...]] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)
    lived: dict[Moment, dict[Category, int]] = field(default_factory=dict)
    footprints: dict[Moment, Footprint] = field(default_factory=dict)


class Llama(NextToken):
    """Hugging Face's Llama, with a place to look from just before each backward."""

    def __init__(self, vocabulary: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        super().__init__(LlamaForCausalLM(config))
        self.before_backward: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits

    def logits(self, ids: Tensor) -> Tensor:
        # As most people write it: a call of the whole module inside its own step, which must cost nothing more.
        logits: Tensor = self(ids)
        return logits

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.before_backward is not None:
            self.before_backward()
        super().backward(loss, *args, **kwargs)


class Observer(Callback):
    """Counts the second optimizer step with all that is around it, and looks into the memory of the third."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.found = Found()
        self._counter: CollectiveCounter | None = None
        self._live: LiveBytes | None = None
        self._backwards = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step, inside = divmod(batch_idx, self.case.accumulate)
        if not inside:
            begin = {1: self._begin_counting, 2: self._begin_looking, 3: self._end}.get(step)
            if begin is not None:
                begin(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._look("after_backward", trainer, pl_module)

    def _begin_counting(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, Mesh3DStrategy)
        self._counter = CollectiveCounter(trainer.strategy.device_mesh)
        self._counter.__enter__()

    def _begin_looking(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._counter is not None
        self._counter.__exit__(None, None, None)
        self.found.counted = comparable(self._counter.table)
        self._live = LiveBytes()
        self._live.__enter__()
        self._live.track(pl_module, *trainer.optimizers)
        self._look("between_steps", trainer, pl_module)
        pl_module.before_backward = lambda: self._before_backward(trainer, pl_module)

    def _before_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._backwards += 1
        if self._backwards == max(2, self.case.microbatches * self.case.accumulate):
            self._look("before_backward", trainer, pl_module)

    def _look(self, moment: Moment, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._live is not None:
            assert self._live.current > 0
            self.found.lived[moment] = self._live.by_category(Owners([pl_module], trainer.optimizers)())

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._live is not None
        self._live.__exit__(None, None, None)
        self._live, pl_module.before_backward = None, None
        strategy: Any = trainer.strategy
        plan = strategy._module_on_mesh.plan
        sizes = data_sizes(plan.parameters, plan.data, plan.mesh, policy=strategy._precision.fsdp_policy())
        microbatches = self.case.microbatches * self.case.accumulate
        self.found.traffic = data_traffic(plan.data, sizes, microbatches=microbatches)
        self.found.footprints = {moment: data_footprint(plan.data, sizes, moment) for moment in self.found.lived}


def comparable(table: Any) -> set[tuple[Any, ...]]:
    return {(row.operation, row.axis, row.group_size, row.calls, row.payload, row.wire) for row in table.rows}


def observe(rank: int, world: int, *cases: Case) -> list[Found]:
    """Runs trainings one after the other in one process."""
    return [_observe(rank, world, case) for case in cases]


def _observe(rank: int, world: int, case: Case) -> Found:
    observer = Observer(case)
    generator = torch.Generator().manual_seed(rank)
    shape = (case.microbatches, LENGTH)
    ids = [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(4 * case.accumulate)]
    run = trainer(
        world,
        observer,
        strategy={"zero_stage": case.zero, "num_microbatches": case.microbatches, **case.more},
        plugins=Mesh3DPrecision(case.precision),
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
    )
    run.fit(Llama(case.vocabulary), loader((batch,) for batch in ids))
    return observer.found


def beside_the_data_axis(case: Case, world: int) -> Traffic:
    """All that a steady optimizer step communicates besides the gradients and weights of the data axis."""

    def row(operation: str, calls: int, size: int) -> Traffic:
        of_calls = TrafficRow(operation=operation, axis=DATA, group_size=world, calls=calls, payload=calls * size)
        return Traffic(rows=(of_calls,))

    scalar = 8 if case.precision == "64-true" else 4
    # Lightning asks rank 0 before every batch whether the job was told to end.
    asked = row("broadcast", case.accumulate, 8)
    # What was logged in a batch: hashes of the names, and room for values.
    logged = row("all_reduce", case.accumulate, 64 * 8)
    # The norm of whole gradients needs no collective, that of shards one.
    clipped = row("all_reduce", 1, scalar) if case.zero else Traffic()
    return asked + logged + clipped


HYBRID = {"data_replicate_size": 2}
MASTER = {"microbatches": 2, "accumulate": 2, "precision": "bf16-master"}
CASES = {
    "zero 0": (4, Case(zero=0, microbatches=4), Case(zero=0, accumulate=4), Case(zero=0, **MASTER)),
    "zero 1": (4, Case(zero=1, microbatches=4), Case(zero=1, accumulate=4), Case(zero=1, **MASTER)),
    "zero 2": (4, Case(zero=2, microbatches=4), Case(zero=2, accumulate=4), Case(zero=2, **MASTER)),
    "zero 3": (4, Case(zero=3, microbatches=4), Case(zero=3, accumulate=4), Case(zero=3, **MASTER)),
    "hybrid": (
        4,
        Case(zero=1, microbatches=4, more=HYBRID),
        Case(zero=2, accumulate=4, more=HYBRID),
        Case(zero=3, more=HYBRID, **MASTER),
    ),
    "padded": (4, Case(zero=1, microbatches=2, vocabulary=33), Case(zero=3, accumulate=2, vocabulary=33)),
    "two ranks": (
        2,
        Case(zero=0, microbatches=2, accumulate=2, precision="64-true"),
        Case(zero=1),
        Case(zero=3, precision="64-true"),
        Case(zero=3, microbatches=2, more={"unit_blocks": 2}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_cost_what_the_formulas_say(name: str) -> None:
    world, *cases = CASES[name]
    assert isinstance(world, int)
    ranks = run_spmd(observe, world, *cases, timeout=110)
    for index, case in enumerate(cases):
        assert isinstance(case, Case)
        for found in ranks:
            expected = found[index].traffic + beside_the_data_axis(case, world)
            assert found[index].counted == comparable(expected), case
        # Padding makes rank 0 the fullest, whose bytes the formulas give.
        assert_lives(ranks[0][index], case)


def assert_lives(found: Found, case: Case) -> None:
    later = {"before_backward"} if case.microbatches * case.accumulate > 1 else set()
    assert set(found.lived) == {"between_steps", "after_backward", *later}
    for moment, footprint in found.footprints.items():
        for kind, categories in KINDS.items():
            lived = sum(found.lived[moment].get(category, 0) for category in categories)
            expected = getattr(footprint, kind)
            assert lived == pytest.approx(expected, rel=0.01), f"{case}, {moment}, {kind}\n{footprint}"


class Sometimes(Learner):
    """Uses its second layer only for micro-batches whose first number is positive."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)))

    def loss(self, batch: Any) -> Tensor:
        first, second = self.model
        return (first(batch) + (second(batch) if batch[0, 0] > 0 else 0)).square().mean()


def test_gradients_that_wait_in_buckets_are_those_of_one_device() -> None:
    batches = tuple(normal(seed, 8, 4) for seed in range(8))
    batches[2][:, 0] = batches[3][:, 0] = -1  # nobody uses the second layer in the second step
    case = Fit(
        make=Sometimes,
        batches=batches,
        strategy={"zero_stage": 0, "num_microbatches": 2},
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    )
    record = assert_equal_to_one_device(2, case)[0]
    assert [len(step) for step in record.gradients] == [4, 2, 4, 4]
