"""Blocks that try to be replayed wrongly: each stays equal, to the bit, to the block that never is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.shards.executor import Shard
from tests.unit.parallel.tensor.replay.toys import WIDTH, Twins, block_with, inputs

SCALE = 1.0
X = inputs(6)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Knob:
    def __init__(self) -> None:
        self.factor = 3


@dataclass(frozen=True)
class Case:
    """A block and what happens to it.

    Attributes:
        forward: Of the block.
        calls: Its inputs; a function between them changes the block.
        replayed: Whether it ends replayed.
        reason: Part of the reason why not.
    """

    forward: Callable[..., Any]
    calls: list[Any]
    replayed: bool = True
    reason: str = ""


def counter(block: Any, x: Tensor) -> Tensor:
    block.calls = getattr(block, "calls", 0) + 1
    return block.core(x) * block.calls


def hidden_list(block: Any, x: Tensor) -> Tensor:
    block.history.append(1)
    return block.core(x) * len(block.history)


def inner_straight_through(block: Any, x: Tensor) -> Tensor:
    hidden = StraightThrough.apply(F.linear(x, block.up)._local)
    return F.linear(Shard(hidden, 2, (2 * WIDTH,), block.group), block.down)


def in_place(block: Any, x: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, 0] = 0.0
    return block.core(copy.mul_(2)) + copy


def in_place_on_input(block: Any, x: Tensor) -> Tensor:
    return block.core(x.mul_(2)) + x


def in_place_behind_autograd(block: Any, x: Tensor) -> Tensor:
    y = block.core(x)
    x.data.mul_(2)
    return y


def inner_no_grad(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.core(x).mean()
    return block.core(x) * scale


def inner_autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = block.core(x)
    return y.float()


def numpy_round_trip(block: Any, x: Tensor) -> Tensor:
    return block.core(torch.from_numpy(np.ascontiguousarray(x.detach().numpy() * 2))) + x


def inner_gradient(block: Any, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
    return block.core(x) + slope


def set_scale(_: Any) -> None:
    globals()["SCALE"] = 2.0


def set_attribute(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(block, name, value())


def add_hook(block: Any) -> None:
    block.norm.register_forward_hook(lambda module, args, output: output * 2)


CASES = {
    "plain": Case(lambda block, x: block.core(block.norm(x)), X),
    "varying length": Case(
        lambda block, x: block.core(x).view(2, -1), [inputs(1, 3 + index % 4)[0] for index in range(12)]
    ),
    "too many lengths": Case(
        lambda block, x: block.core(x).view(2, -1), [inputs(1, 3 + index)[0] for index in range(12)]
    ),
    "branch on a value": Case(
        lambda block, x: block.core(x) * 2 if x.sum() > 0 else block.core(x), X, False, "__bool__"
    ),
    "item": Case(lambda block, x: block.core(x) * x.max().item(), X, False, "item"),
    "int": Case(lambda block, x: block.core(x)[:, : int(x.abs().max()) + 1].sum(), X, False, "__int__"),
    "flags and rates": Case(
        lambda block, x: F.dropout(block.core(x), block.rate, block.training),
        [
            *(X[0], X[1], set_attribute("rate", lambda: 0.5), X[2], X[3], X[4], nn.Module.eval, X[0], X[1], X[2]),
            *(nn.Module.train, X[3], X[4]),
        ],
    ),
    "counter": Case(counter, X, False, "attributes"),
    "hidden list": Case(hidden_list, X, False, "not what it did"),
    "python random": Case(
        lambda block, x: block.core(x) * (2 if random.random() < 0.5 else 1), X, False, "Python or NumPy"
    ),
    "custom function": Case(lambda block, x: block.core(Cube.apply(x)), X, False, "custom autograd function"),
    "straight through": Case(
        lambda block, x: block.core(StraightThrough.apply(x)), X, False, "custom autograd function"
    ),
    "straight through on parts": Case(inner_straight_through, X, False, "custom autograd function"),
    "reentrant checkpoint": Case(
        lambda block, x: block.core(checkpoint(block.norm, x, use_reentrant=True)), X, False, "reentrant checkpoint"
    ),
    "reentrant checkpoint of shards": Case(
        lambda block, x: checkpoint(block.core, x, use_reentrant=True), X, False, "reentrant checkpoint"
    ),
    "checkpoint": Case(lambda block, x: checkpoint(block.core, x, use_reentrant=False), X, False, "hooks of saved"),
    "numpy": Case(numpy_round_trip, X, False, "numpy"),
    "new tensors": Case(lambda block, x: block.core(x) * torch.tensor([2.0] * WIDTH) + torch.arange(WIDTH), X),
    "in place": Case(in_place, X),
    "in place on the input": Case(in_place_on_input, [x.detach() for x in X]),
    "in place behind autograd": Case(in_place_behind_autograd, X, False, "not what it did"),
    "inner no_grad": Case(inner_no_grad, X),
    "inner autocast": Case(inner_autocast, X, False, "autocast"),
    "inner gradient": Case(inner_gradient, X),
    "new parameter": Case(
        lambda block, x: block.core(x),
        [*X[:3], set_attribute("up_weight", lambda: nn.Parameter(torch.ones(WIDTH, WIDTH))), *X[3:]],
    ),
    "hook added later": Case(lambda block, x: block.core(block.norm(x)), [*X[:3], add_hook, *X[3:]], False, "hook"),
    "global": Case(lambda block, x: block.core(x) * SCALE, [*X[:3], set_scale, *X[3:]]),
    "tuple": Case(lambda block, x: (block.core(x), None, {"shard": F.linear(x, block.up), "list": [x, 3]}), X),
    "choices": Case(lambda block, x: block.core(x).gather(-1, x.topk(2, -1)[1]), X),
    "selected by values": Case(lambda block, x: block.core(x[x.sum(-1) > 0]), X, False, "__getitem__"),
    "nonzero": Case(lambda block, x: block.core(x[:, (x.sum((0, 2)) > 0).nonzero().flatten()]), X, False, "nonzero"),
    "random numbers of torch": Case(lambda block, x: block.core(x) + torch.randn(WIDTH) * torch.rand_like(x), X),
    "unpacked": Case(lambda block, x: sum(block.core(part) for part in x) + x.mT.transpose(1, 2).data, X),
    "written to": Case(lambda block, x: block.norm(x).add_(block.norm.bias).mul_(2), X),
}


@pytest.fixture(autouse=True)
def _scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replayed_and_plain_are_equal(case: Case) -> None:
    twins = Twins(block_with(case.forward))
    for seed, call in enumerate(case.calls):
        if isinstance(call, Tensor):
            twins.call(call, seed=seed)
        else:
            twins.change(call)
    report = twins.replay.report()
    assert report.replayed is case.replayed, report
    assert case.reason in str(report)


def test_flags_of_a_call_are_kinds_of_their_own() -> None:
    twins = Twins(block_with(lambda block, x, double=False: block.core(x) * (2 if double else 1)))
    for index in range(6):
        twins.call(X[0], index % 2 == 0)
        twins.call(X[0], double=index % 3 == 0)
    assert twins.replay.report().replayed


def test_objects_as_arguments_are_not_replayed() -> None:
    twins = Twins(block_with(lambda block, x, knob=None: block.core(x) * knob.factor))
    knob = Knob()
    for x in X:
        twins.call(x, knob=knob)
        knob.factor += 1
    assert "knob is a Knob" in str(twins.replay.report())


def test_one_tensor_in_two_places_is_another_kind() -> None:
    twins = Twins(block_with(lambda block, x, y: block.core(x) * 2 + y))
    for x, y in ((X[0], X[0]), (X[1], X[1]), (X[2], X[2]), (X[0], X[1]), (X[3], X[4]), (X[5], X[1])):
        twins.call(x, y)
    assert twins.replay.report().replayed


def test_a_kind_that_differs_in_grad_mode() -> None:
    twins = Twins(block_with(lambda block, x: block.core(block.norm(x))))
    for x in X:
        twins.call(x)
        with torch.no_grad():
            twins.call(x)
    assert twins.replay.report().replayed
