"""Gradients that are summed later, through the Trainer: one sum for each optimizer step, none in a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_3d.counters import CollectiveCounter
from tests.marks import more
from tests.parity.models import LENGTH, VOCABULARY, NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

LAYERS, BATCHES = 2, 6
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
}


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=1))


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with weights whose gradients are summed later, and arguments of the strategy."""

    model: Callable[[], nn.Module]
    strategy: dict[str, Any] = field(default_factory=dict)


FEW = (
    Case(model=gemma),
    # Norms with their biases, biases of row weights, positions.
    Case(model=PackedGPT, strategy={"sequence_parallel": True}),
)
MANY = (
    Case(model=qwen, strategy={"tensor_parallel_size": 4}),
    Case(model=gemma, strategy={"zero_stage": 3}),
    Case(model=PackedGPT, strategy={"zero_stage": 3, "sequence_parallel": True}),
)


class Counted(Callback):
    """Counts the all-reduces of tensor ranks in each batch."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        self._counter = CollectiveCounter(strategy.device_mesh)
        self._counter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self._counter.__exit__(None, None, None)
        self.calls.append(self._counter.table.calls("all_reduce", "tensor_parallel"))


def counted(rank: int, world: int, cases: tuple[Case, ...]) -> list[list[int]]:
    return [_counted(world, case) for case in cases]


def _counted(world: int, case: Case) -> list[int]:
    counts = Counted()
    trainer = Ranks(world=world, strategy={"tensor_parallel_size": 2, **case.strategy}).trainer(
        counts, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    trainer.fit(NextToken(case.model()), loader(tokens(BATCHES, 4)))
    return counts.calls


@pytest.mark.parametrize(("world", "cases"), [(2, FEW), more(4, MANY)], ids=["two", "four"])
def test_micro_batches_leave_sums_to_the_optimizer_step(world: int, cases: tuple[Case, ...]) -> None:
    # Two forward and two backward in each block; the embedding, the head's input, two in the loss.
    expected = 4 * LAYERS + 4
    for found in run_spmd(counted, world, cases, timeout=120):
        for case, calls in zip(cases, found, strict=True):
            # What is logged meets over all ranks, which may be those of this axis.
            logged = case.strategy.get("tensor_parallel_size", 2) == world
            # In the first batches the plan is made and blocks are recorded.
            assert calls[-4:] == [expected + logged, expected + logged + 1] * 2, case
