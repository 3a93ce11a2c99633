"""What a step sends over the tensor axis, counted through the Trainer: for a block what Megatron sends, little else."""

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

WIDTH, SAMPLES, BATCHES = 32, 4, 6
# Bytes of the activations of one block in fp64.
ACTIVATIONS = SAMPLES * LENGTH * WIDTH * 8

# Calls and payload of the operations over each axis.
Counts = dict[str, tuple[int, int]]


def packed(layers: int) -> nn.Module:
    return PackedGPT(layers=layers)


def qwen(layers: int) -> nn.Module:
    """Norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_sizes(layers), num_key_value_heads=2, head_dim=8))


def gemma(layers: int) -> nn.Module:
    """One head of keys and values, which every rank has."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**_sizes(layers), num_key_value_heads=1, head_dim=8))


def _sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, and how many all-reduces its batches need outside of blocks.

    Attributes:
        model: Builds a model with so many blocks.
        outside: All-reduces outside of blocks in each of the last two batches: 1 of the embedding, 1 of the head's
            backward, 2 of the loss, 1 of partial gradients of weights where there are some; 1 for the norm.
        sequence: Sequence parallelism.
        strategy: More arguments of the strategy.
        options: Arguments of the Trainer.
    """

    model: Callable[[int], nn.Module]
    outside: tuple[int, int]
    sequence: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(model=packed, outside=(4, 4)),
    Case(model=qwen, outside=(5, 5)),
    Case(model=gemma, outside=(5, 5)),
    Case(model=qwen, outside=(4, 6), options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    Case(model=packed, outside=(5, 5), sequence=True),
    Case(model=qwen, outside=(5, 5), sequence=True),
)
BESIDE_DATA = (
    Case(model=packed, outside=(4, 4), strategy={"zero_stage": 0}),
    Case(model=qwen, outside=(5, 5), strategy={"zero_stage": 1}),
    Case(model=qwen, outside=(5, 5), strategy={"zero_stage": 3}),
    Case(model=packed, outside=(5, 5), sequence=True, strategy={"zero_stage": 3}),
)


class Counted(Callback):
    """Counts the collectives of the last two batches; in the first ones blocks are recorded."""

    def __init__(self) -> None:
        self.batches: list[Counts] = []
        self._counter: CollectiveCounter | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx >= BATCHES - 2:
            strategy: Any = trainer.strategy
            self._counter = CollectiveCounter(strategy.device_mesh)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            rows = self._counter.table.rows
            self.batches.append({f"{row.operation} {row.axis}": (row.calls, row.payload) for row in rows})


def counted(rank: int, world: int, cases: tuple[Case, ...]) -> list[tuple[list[Counts], list[Counts]]]:
    return [(_counted(world, case, 2), _counted(world, case, 3)) for case in cases]


def _counted(world: int, case: Case, layers: int) -> list[Counts]:
    counts = Counted()
    strategy = {"tensor_parallel_size": 2, "sequence_parallel": case.sequence, **case.strategy}
    trainer = Ranks(world=world, strategy=strategy).trainer(counts, use_distributed_sampler=False, **case.options)
    trainer.fit(NextToken(case.model(layers)), loader(tokens(BATCHES, SAMPLES)))
    return counts.batches


def assert_few(case: Case, world: int, two: list[Counts], three: list[Counts]) -> None:
    for at, outside in enumerate(case.outside):
        for operation in ("all_reduce", "all_gather"):
            key = f"{operation} tensor_parallel"
            calls, payload = two[at].get(key, (0, 0))
            more_calls, more_payload = three[at].get(key, (0, 0))
            # Two forward and two backward; a reduce-scatter is an all-reduce where gloo has none.
            expected = 4 if case.sequence or operation == "all_reduce" else 0
            assert more_calls - calls == expected, f"{case}: {two[at]}, {three[at]}"
            activations = expected * ACTIVATIONS
            # Partial gradients of small weights come with the others, in one call.
            assert activations <= more_payload - payload < activations + ACTIVATIONS / 2, f"{case}: {two[at]}"
            if operation == "all_reduce":
                # What was logged meets over all ranks, which may be those of this axis.
                assert calls - 2 * expected == outside + (world == 2), f"{case}: {two[at]}"


@pytest.mark.parametrize(("world", "cases"), [(2, CASES), more(4, BESIDE_DATA)], ids=["alone", "beside the data axis"])
def test_blocks_send_what_megatron_sends(world: int, cases: tuple[Case, ...]) -> None:
    for found in run_spmd(counted, world, cases, timeout=120):
        for case, (two, three) in zip(cases, found, strict=True):
            assert_few(case, world, two, three)
