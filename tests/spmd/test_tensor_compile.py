"""Parts that the user has compiled run as they are on the tensor axis, exactly, and Dynamo compiles nothing of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_3d.errors import ModuleError
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, seen_alike, tokens

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(180),
    # Dynamo makes an instance of every autograd function that it meets.
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated"),
]


@torch.compile(backend="eager")
def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Evaluated(NextToken):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Decorated(Evaluated):
    """A compiled method and a compiled function."""

    @torch.compile(backend="eager")
    def logits(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def loss(self, batch: Any) -> Tensor:
        return loss_of(self.logits(batch[0]), batch[0])


class Hooked(Decorated):
    """Calls a compiled method outside of steps, too."""

    def on_validation_epoch_end(self) -> None:
        self.log("hook", self.logits(torch.arange(12).view(1, 12)).square().mean(), sync_dist=True)


def wrapped() -> LightningModule:
    return Evaluated(torch.compile(PackedGPT(), backend="eager"))


def in_place() -> LightningModule:
    module = Evaluated(PackedGPT())
    module.model.blocks[0].compile(backend="eager")
    module.model.blocks[1].attention.compile(backend="eager")
    module.model.norm = torch.compile(module.model.norm, backend="eager")
    return module


def decorated() -> LightningModule:
    return Decorated(PackedGPT())


NAMED = {
    wrapped: "model",
    in_place: "model.blocks.0, model.blocks.1.attention, model.norm",
    decorated: "Decorated.logits, loss_of",
}


class Notices(logging.Handler):
    """What is said of torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "torch.compile" in record.getMessage():
            self.texts.append(record.getMessage())


def trained(ranks: Ranks, make: Callable[[], LightningModule], graphs: int) -> Any:
    """Trains with parts that users compiled; ``graphs`` are compiled all the same."""
    torch._dynamo.reset()
    module, notices = make(), Notices()
    names = list(module.state_dict())
    rank_zero.log.addHandler(notices)
    counters.clear()
    try:
        with torch.compiler.set_stance("default" if ranks.cut else "force_eager"):
            record = ranks.fit(module, loader(tokens(4)), loader(tokens(2)))
    finally:
        rank_zero.log.removeHandler(notices)
    assert list(module.state_dict()) == names
    assert not counters["frames"]
    assert counters["stats"]["unique_graphs"] == (graphs if ranks.cut else 0)
    told = 1 if ranks.cut and dist.get_rank() == 0 else 0
    assert [f"left out of {NAMED[make]}, since" in text for text in notices.texts] == [True] * told
    # What is no part of a step is compiled as ever.
    loss_of(torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.long))
    assert counters["frames"]["total"] == 1
    return record


@pytest.mark.parametrize("make", NAMED, ids=lambda each: each.__name__)
def test_compiled_parts_run_as_they_are(make: Callable[[], LightningModule]) -> None:
    seen_alike(partial(trained, make=make, graphs=0))


# Inductor imports parts of torch that call themselves old.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_blocks_are_compiled_instead() -> None:
    # The blocks are alike: one graph to train, one to evaluate.
    seen_alike(partial(trained, make=wrapped, graphs=2), compile=True)


def hooked(ranks: Ranks) -> Any:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default" if ranks.cut else "force_eager"):
        return ranks.fit(Hooked(PackedGPT()), loader(tokens(2)), loader(tokens(2)))


@pytest.mark.thorough
def test_a_hook_calls_a_compiled_method() -> None:
    seen_alike(hooked)


def whole_module(rank: int, world: int) -> str:
    with pytest.raises(ModuleError) as caught:
        Ranks(world=world).trainer().fit(torch.compile(decorated(), backend="eager"), loader(tokens(2)))
    return str(caught.value)


def test_a_whole_compiled_module_is_refused_with_a_way_out() -> None:
    for text in run_spmd(whole_module, 2):
        assert "Decorated was compiled as a whole" in text
        assert "Mesh3DStrategy(compile=True)" in text
