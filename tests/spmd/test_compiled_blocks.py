"""``compile=True`` where no tensor is cut: with shards, micro-batches, recomputation and dropout, and on copies."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_3d import Mesh3DStrategy
from tests.parity.models import NextToken
from tests.spmd.fits import Fit, assert_equal_to_one_device, loader, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import WIDTH, Plain, classified

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(300)]


class CheapCompiler(Callback):
    """Compiles without a C++ compiler, and sees whether anything was compiled."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.compiler.set_default_backend("aot_eager")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.compiler.set_default_backend(None)
        assert isinstance(trainer.strategy, Mesh3DStrategy)
        assert bool(counters["stats"]["unique_graphs"]) == trainer.strategy.config.compile
        assert not counters["graph_break"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(torch.tanh(self.linear(self.norm(hidden))))


class Dropping(Plain):
    """Has dropout in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(Block() for _ in range(3))


def caching() -> LightningModule:
    """Fills a cache of keys and values that nobody reads, as models of Hugging Face do unless they are told not to."""
    config = GPT2Config(vocab_size=96, n_embd=16, n_layer=2, n_head=2, n_positions=12, use_cache=True)
    return NextToken(GPT2LMHeadModel(config))


def tokens(samples: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return (torch.randint(0, 96, (samples, 12), generator=generator),)


case = partial(Fit, make=Dropping, batches=classified(3, 8), trainer={"callbacks": [CheapCompiler]})


def test_trains_as_without() -> None:
    assert_equal_to_one_device(
        2,
        case(strategy={"compile": True, "zero_stage": 0}),
        case(strategy={"compile": True, "zero_stage": 3}),
        case(strategy={"compile": True, "zero_stage": 1, "num_microbatches": 2, "activation_checkpointing": "full"}),
        case(strategy={"compile": True, "zero_stage": 3, "activation_checkpointing": "selective"}),
        timeout=200,
    )


def test_blocks_that_fill_a_cache() -> None:
    assert_equal_to_one_device(
        2,
        case(strategy={"compile": True}, make=caching, batches=(tokens(4), tokens(4))),
        timeout=200,
    )


class Averaged(Plain):
    """Has a copy of its network, made while a Trainer runs it, which computes after the weights have moved on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model(batch[0])
            self.before = copy.deepcopy(self.model)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                moved = (self.before(batch[0]) - self.model(batch[0])).abs().max()
            assert moved > 0


def fit_with_copy(rank: int, world: int) -> None:
    L.seed_everything(1, verbose=False)
    run = trainer(world, CheapCompiler(), strategy={"compile": True}, max_epochs=1, precision="64-true")
    run.fit(Averaged(), loader(classified(2, 4)))


def test_copies_compute_with_their_own_weights() -> None:
    run_spmd(fit_with_copy, 1)
