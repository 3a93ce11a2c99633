"""Parameters in the hooks of batches that accumulate, and between forward and backward: they rest there too."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.marks import more
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader, normal
from tests.spmd.tensor_runs import Ranks, seen_alike, tokens
from tests.spmd.toys import CLASSES, WIDTH, Plain

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

# Between forward and backward only what torch does not count as a write is allowed anywhere.
BETWEEN = ("on_before_zero_grad", "on_before_backward")
AROUND = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2, zero 1": (2, {"tensor_parallel_size": 1, "zero_stage": 1}),
    "data 2, zero 2": (2, {"tensor_parallel_size": 1, "zero_stage": 2}),
    "data 2, zero 3": (2, {"tensor_parallel_size": 1, "zero_stage": 3}),
    "tensor 2 x data 2, zero 0": (4, {"tensor_parallel_size": 2, "zero_stage": 0}),
    "tensor 2 x data 2, zero 1": (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
}


class Hooked(NextToken):
    """Does something with its weights in one of its hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__(PackedGPT())
        for child in self.model.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.calls = 0
        setattr(self, hook, self.called)

    def called(self, *args: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class Averaged(Hooked):
    """Keeps an average by hand."""

    def act(self) -> None:
        for average, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)


class Clamped(Hooked):
    """Keeps its weights in a range that becomes narrower."""

    def act(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.3 * 0.9**self.calls, 0.3 * 0.9**self.calls)


class Rewritten(Hooked):
    """Writes to some of its weights, in the ways that are not by a method of the parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam would make numbers out of the rounding errors of keys' biases, whose gradients are zero.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def act(self) -> None:
        blocks: Any = self.model.blocks
        block = blocks[0]
        torch._foreach_mul_([block.mlp[0].weight.detach(), block.mlp[0].bias.data], 0.9)
        block.attention.pack.weight[3] = 0.1 * self.calls
        nn.init.normal_(blocks[1].attention.pack.weight, std=0.1)


def trained(kind: type[Hooked], ranks: Ranks, hooks: tuple[str, ...]) -> Any:
    seen = []
    for hook in hooks:
        torch.manual_seed(3)
        module = kind(hook)
        record = ranks.fit(module, loader(tokens(6)), use_distributed_sampler=False, accumulate_grad_batches=2)
        strategy: Any = module.trainer.strategy
        whole = {name: strategy.full_tensor(name, value) for name, value in module.named_parameters()}
        seen.append((hook, module.calls, record, whole))
    return seen


def averaged(ranks: Ranks) -> Any:
    return trained(Averaged, ranks, BETWEEN + AROUND)


def clamped(ranks: Ranks) -> Any:
    return trained(Clamped, ranks, BETWEEN + AROUND)


def rewritten(ranks: Ranks) -> Any:
    return trained(Rewritten, ranks, AROUND)


class InStages(Plain):
    """Keeps its weights in a range that becomes narrower, on the stages of a pipeline."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.calls = 0
        setattr(self, hook, self.called)

    @torch.no_grad()
    def called(self, *args: Any) -> None:
        self.calls += 1
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.3 * 0.9**self.calls, 0.3 * 0.9**self.calls)


def in_stages(ranks: Ranks) -> Any:
    seen = []
    targets = torch.randint(0, CLASSES, (4,), generator=torch.Generator().manual_seed(5))
    batches = [(normal(seed, 4, WIDTH), targets) for seed in range(6)]
    for hook in AROUND:
        torch.manual_seed(3)
        module = InStages(hook)
        trainer = ranks.trainer(
            strategy={"num_microbatches": 2}, use_distributed_sampler=False, accumulate_grad_batches=2
        )
        trainer.fit(module, loader(batches))
        strategy: Any = trainer.strategy
        whole = {name: strategy.full_tensor(name, value) for name, value in module.named_parameters()}
        seen.append((hook, module.calls, whole))
    return seen


@pytest.mark.parametrize("zero", [more(0), 1, more(3)])
def test_in_every_hook_of_a_pipeline(zero: int) -> None:
    mesh = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    seen_alike(in_stages, 4, timeout=200, zero_stage=zero, **mesh)


# One mesh for two scenarios, and all others where there is time.
QUICK = {(averaged, "data 2, zero 3"), (rewritten, "data 2, zero 1")}
CELLS = [(case if case in QUICK else more(*case)) for case in itertools.product((averaged, clamped, rewritten), MESHES)]


@pytest.mark.parametrize(("scenario", "mesh"), CELLS, ids=lambda each: getattr(each, "__name__", each))
def test_in_every_hook_of_batches_that_accumulate(scenario: Any, mesh: str) -> None:
    world, strategy = MESHES[mesh]
    seen_alike(scenario, world, timeout=200, **strategy)
