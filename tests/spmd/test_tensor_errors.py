"""Sizes that ranks do not divide, impossible plans, code that reads values: one device's numbers or one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import ModuleError, PlanError
from tests.parity.models import Learner, NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader, normal
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, is_cut, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


class Between(Learner):
    """Does something with activations that are cut, between two linear layers."""

    def __init__(self, use: Callable[[Tensor], Any], *, first: int) -> None:
        super().__init__(nn.ModuleDict({"a": Pair(), "b": Pair()}))
        self.use, self.first = use, first
        self.step = 0
        self.cut: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step = batch_idx
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        hidden = self.model["a"].first(batch[0])
        self.cut.append(is_cut(hidden))
        used = self.use(hidden) if self.step >= self.first else hidden
        return self.model["b"](self.model["a"].second(used)).square().mean()


def by_item(hidden: Tensor) -> Tensor:
    return hidden * hidden.detach().abs().max().item()


def by_float(hidden: Tensor) -> Tensor:
    return hidden * float(hidden.detach().std())


def by_list(hidden: Tensor) -> Tensor:
    return hidden * sum(hidden.detach()[0].tolist())


def by_numpy(hidden: Tensor) -> Tensor:
    return hidden * torch.from_numpy(np.abs(hidden.detach().numpy()))


def by_array(hidden: Tensor) -> Tensor:
    return hidden * float(np.asarray(hidden.detach()).mean())


def by_data(hidden: Tensor) -> Tensor:
    return hidden * hidden.data.mean()


def by_branch(hidden: Tensor) -> Tensor:
    return hidden * 2 if hidden.detach().sum() > 0 else hidden * 3


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class CumulativeSum(torch.autograd.Function):
    """What a rank computes of its part alone would be wrong."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(-1).cumsum(-1).flip(-1)


def by_function(hidden: Tensor) -> Tensor:
    return Doubles.apply(hidden)


def by_other_function(hidden: Tensor) -> Tensor:
    return CumulativeSum.apply(hidden)


def by_pointer(hidden: Tensor) -> Tensor:
    return hidden if hidden.data_ptr() is not None else hidden * 2


def by_storage(hidden: Tensor) -> Tensor:
    return hidden * float(hidden.detach().untyped_storage().nbytes())


Use = Callable[[Tensor], Tensor]
READING: tuple[Use, ...] = (by_item, by_float, by_list, by_numpy, by_array, by_data, by_branch)
# What has its own name, or reads memory, and the words that name it.
FOREIGN: tuple[tuple[Use, str], ...] = (
    (by_function, "custom autograd function Doubles"),
    (by_other_function, "custom autograd function CumulativeSum"),
    (by_pointer, "data_ptr at"),
    (by_storage, "untyped_storage at"),
)


def rows(count: int) -> Any:
    return loader([(normal(seed, 4, 6),) for seed in range(count)])


# ---- values ----


def used(ranks: Ranks, first: int, uses: tuple[Use, ...]) -> Any:
    """What is used from the step that the plan is made from on, or only later."""
    found = []
    for use in uses:
        module = Between(use, first=first)
        found.append(ranks.fit(module, rows(3)))
        assert first == 0 or not ranks.cut or all(module.cut)
    return found


def used_at_once(ranks: Ranks) -> Any:
    return used(ranks, 0, (*READING, by_function, by_other_function, by_storage))


def used_later(ranks: Ranks) -> Any:
    return used(ranks, 1, READING)


class Branches(nn.Module):
    """A block that reads values of what it was given."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.pair, self.use = Pair(), use

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * self.use(self.pair(hidden))


class InBlocks(Learner):
    def __init__(self, use: Use) -> None:
        super().__init__(nn.Sequential(Branches(use), Branches(use)))

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch[0]).square().mean()


def used_in_blocks(ranks: Ranks) -> Any:
    # Enough steps for a block to be replayed, and signs that change from step to step.
    return [ranks.fit(InBlocks(use), rows(6)) for use in (by_item, by_numpy, by_branch)]


# ---- sizes ----


class Large(NextToken):
    """A vocabulary that no degree divides but 3, 9, 167 and the like."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(50257, 4), Pair4(), nn.Linear(4, 50257, bias=False)))
        self.model[2].weight = self.model[0].weight


class Pair4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.net(hidden)


def explained(ranks: Ranks, module: Learner, texts: tuple[str, ...]) -> Any:
    """Trains, and looks for texts in the plan."""
    trainer = ranks.trainer(max_steps=3)
    trainer.fit(module, loader(tokens(3)))
    strategy: Any = trainer.strategy
    for text in texts if ranks.cut else ():
        assert re.search(text, strategy.explain()), f"{text} is not in {strategy.explain()}"
    return float(trainer.callback_metrics["train_loss"])


def large_vocabulary(ranks: Ranks) -> Any:
    return explained(ranks, Large(), (r"model.0.weight +replicate +50257x4 +50257 rows are not a multiple of 2",))


def odd_heads(ranks: Ranks) -> Any:
    reasons = (r"attention.pack.weight x 2 +replicate", r"3 .*not a multiple of 2", r"mlp.*column")
    return explained(ranks, NextToken(PackedGPT(width=36, heads=3)), reasons)


def too_many_ranks_for_features(ranks: Ranks) -> Any:
    return explained(ranks, NextToken(PackedGPT(width=32, heads=4)), (r"replicate .*not a multiple of 3",))


def forced(ranks: Ranks) -> Any:
    """Styles that nobody would choose, and that are exact."""
    plans = ({"model.a.first": "row"}, {"model.a.first": "column:4"}, {"model.?.second.weight": "column"})
    strategies: list[dict[str, Any]] = [{"tensor_plan": plan} if ranks.cut else {} for plan in plans]
    return [ranks.fit(Between(by_data, first=1), rows(3), strategy=strategy) for strategy in strategies]


SCENARIOS = (used_at_once, used_later, used_in_blocks, large_vocabulary, odd_heads, forced)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_numbers_of_one_device(scenario: Callable[[Ranks], Any]) -> None:
    seen_alike(scenario, timeout=90)


def test_numbers_of_one_device_on_three_ranks() -> None:
    seen_alike(too_many_ranks_for_features, 3)


# ---- errors ----


def refused(rank: int, world: int, strategy: dict[str, Any], module: Learner, data: Any) -> str:
    ranks = Ranks(world=world, strategy=strategy)
    with pytest.raises((ModuleError, PlanError)) as caught:
        ranks.trainer().fit(module, loader(data))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("use", "words"), FOREIGN, ids=lambda each: getattr(each, "__name__", ""))
def test_what_reads_memory_later_is_named_with_its_place(use: Use, words: str) -> None:
    for text in run_spmd(refused, 2, {}, Between(use, first=1), [(normal(0, 4, 6),)] * 2, timeout=30):
        assert text.startswith("ModuleError"), text
        assert words in text
        assert re.search(r"test_tensor_errors\.py:\d+", text), text
        assert "fix: tensor_plan" in text


def narrow() -> Learner:
    module = Between(by_data, first=9)
    module.model["a"].first, module.model["a"].second = nn.Linear(6, 9), nn.Linear(9, 15)
    module.model["b"].first, module.model["b"].second = nn.Linear(15, 9), nn.Linear(9, 15)
    return module


def test_a_kernel_that_takes_a_pointer_is_named_before_training() -> None:
    for text in run_spmd(refused, 2, {}, Between(by_pointer, first=0), [(normal(0, 4, 6),)], timeout=30):
        assert re.match(r"ModuleError: data_ptr at .*test_tensor_errors\.py:\d+", text), text


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"tensor_plan": {"*.frist": "column"}}, ("'*.frist', which matches no module", "*.first")),
        ({"tensor_plan": {"*.first": "colum"}}, ("unknown style 'colum'", "'column'")),
        ({"tensor_plan": {"model.a.first": "vocab"}}, ("model.a.first", "no embedding")),
        ({"tensor_plan": {"model.b": "column"}}, ("model.b, which owns no weight matrix", "model.b.first")),
        ({"tensor_plan": {"*": "replicate"}}, ("no parameter of the model can be cut",)),
        ({"tensor_plan": {"model.a.first": "column:3"}}, ("model.a.first", "8 output features, which are no 3")),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else "",
)
def test_impossible_plans_are_refused(strategy: dict[str, Any], words: tuple[str, ...]) -> None:
    for text in run_spmd(refused, 2, strategy, Between(by_data, first=9), [(normal(0, 4, 6),)], timeout=30):
        assert text.startswith("PlanError"), text
        assert all(word in text for word in words), text


def test_where_nothing_can_be_cut_useful_degrees_are_listed() -> None:
    for text in run_spmd(refused, 2, {}, narrow(), [(normal(0, 4, 6),)], timeout=30):
        assert "tensor_parallel_size=2: no parameter of the model can be cut" in text
        assert "valid: tensor_parallel_size of 1, 3" in text, text
        assert "fix: tensor_parallel_size=3" in text
