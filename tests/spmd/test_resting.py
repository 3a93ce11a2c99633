"""Parameters in hooks: averages by hand, writes to data, to rows, and of whole values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import more
from tests.parity.models import NextToken
from tests.parity.tensor_models import TENSOR_MODELS, PackedGPT
from tests.spmd.fits import loader
from tests.spmd.tensor_runs import Ranks, Scenario, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]
Follow = Callable[[Any, Any], Any]


def lerp(average: Any, parameter: Any) -> None:
    average.lerp_(parameter, 0.1)


def data(average: Any, parameter: Any) -> None:
    average.data = 0.9 * average.data + 0.1 * parameter.data


def in_place(average: Any, parameter: Any) -> None:
    average.data.mul_(0.9).add_(parameter.data, alpha=0.1)


class Averaged(NextToken):
    """Keeps an average of its weights by hand, in a copy that no step calls."""

    def __init__(self, model: nn.Module, follow: Follow) -> None:
        super().__init__(model)
        for child in model.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.follow = follow

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for average, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            self.follow(average, parameter)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model, self.average = self.average, self.model
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.model, self.average = self.average, self.model


def averaged(model: Callable[[], nn.Module], follow: Follow) -> Scenario:
    def scenario(ranks: Ranks) -> Any:
        module = Averaged(model(), follow)
        record = ranks.fit(module, loader(tokens(4)), loader(tokens(1)), use_distributed_sampler=False)
        strategy: Any = module.trainer.strategy
        whole = {name: strategy.full_tensor(name, value) for name, value in module.named_parameters()}
        return record, whole, dict(module.trainer.callback_metrics)

    return scenario


def gpt2() -> nn.Module:
    return TENSOR_MODELS["HF GPT-2 (eager)"][0]().model


def packed_lerp(ranks: Ranks) -> Any:
    return averaged(PackedGPT, lerp)(ranks)


def packed_data(ranks: Ranks) -> Any:
    return averaged(PackedGPT, data)(ranks)


def packed_in_place(ranks: Ranks) -> Any:
    return averaged(PackedGPT, in_place)(ranks)


def gpt2_lerp(ranks: Ranks) -> Any:
    return averaged(gpt2, lerp)(ranks)


def gpt2_data(ranks: Ranks) -> Any:
    return averaged(gpt2, data)(ranks)


AVERAGES: tuple[Scenario, ...] = (packed_lerp, packed_data, packed_in_place, gpt2_lerp, gpt2_data)


@pytest.mark.parametrize("scenario", AVERAGES, ids=lambda each: each.__name__)
def test_averages_by_hand(scenario: Scenario) -> None:
    seen_alike(scenario)


@pytest.mark.parametrize("stage", [1, more(3)])
@pytest.mark.parametrize("scenario", [packed_lerp, gpt2_data], ids=lambda each: each.__name__)
def test_averages_by_hand_beside_the_data_axis(scenario: Scenario, stage: int) -> None:
    seen_alike(scenario, 4, tensor_parallel_size=2, zero_stage=stage)


class Written(NextToken):
    """Writes to its weights in hooks, in every way that needs no whole value."""

    def __init__(self) -> None:
        super().__init__(PackedGPT())
        for block in self.model.blocks:
            block.mlp[3].p = 0.0
        self.start = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        attention, mlp = self.model.blocks[0].attention, self.model.blocks[1].mlp
        attention.pack.weight[3] = 0.0
        attention.pack.weight[40:50, ::2] = torch.ones(10, 16)
        attention.pack.bias.fill_(0.1)
        mlp[0].weight[5] = mlp[0].weight[6] * 2
        mlp[0].bias.data = mlp[0].bias.data.clamp(-0.1, 0.1)
        for name, parameter in self.model.named_parameters():
            parameter.lerp_(self.start[name].to(parameter), 0.05)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad.data.add_(parameter.data, alpha=0.01)


def written(ranks: Ranks) -> Any:
    return ranks.fit(Written(), loader(tokens(4)), use_distributed_sampler=False)


def test_written_in_hooks() -> None:
    seen_alike(written)


@pytest.mark.parametrize("stage", [more(1), 3])
def test_written_in_hooks_beside_the_data_axis(stage: int) -> None:
    seen_alike(written, 4, tensor_parallel_size=2, zero_stage=stage)


@pytest.mark.parametrize("stage", [1, more(2), 3])
def test_written_in_hooks_on_the_data_axis(stage: int) -> None:
    seen_alike(written, 2, tensor_parallel_size=1, zero_stage=stage)


class Rewritten(Written):
    """Takes a whole weight, changes some of its rows, and writes it back."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.model.blocks[0].attention.pack.weight
        whole = full(weight)
        whole[:32].mul_(0.5)
        weight.copy_(whole)
        self.log("first", whole[0, 0])
        assert torch.equal(weight, whole)
        assert not torch.equal(weight, self.model.blocks[1].attention.pack.weight)


def full(tensor: Tensor) -> Tensor:
    shards: Any = tensor
    return shards.full_tensor() if hasattr(shards, "full_tensor") else tensor.clone()


def rewritten(ranks: Ranks) -> Any:
    return ranks.fit(Rewritten(), loader(tokens(3)), use_distributed_sampler=False)


def test_rewritten_as_a_whole() -> None:
    seen_alike(rewritten)


def test_rewritten_as_a_whole_beside_the_data_axis() -> None:
    seen_alike(rewritten, 4, tensor_parallel_size=2, zero_stage=3)
