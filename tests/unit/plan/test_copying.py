from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_3d.graph.calls import around_calls, around_forward, shadow
from lightning_3d.plan.copying import serve_copying


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tied = self.layer
        self.act = self.doubled
        self.sizes = [2, 2]

    def doubled(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(self.layer(value))
        return result


class Learner(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = Net(), MeanMetric()


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("belongs to the library")


@pytest.fixture
def made() -> list[tuple[nn.Module, str]]:
    return []


@pytest.fixture
def learner(made: list[tuple[nn.Module, str]]) -> Learner:
    """A module into which the library has put this and that."""
    learner = Learner()
    serve_copying(learner, "", lambda copied, name: made.append((copied, name)))
    engine = Uncopied()
    for part in learner.modules():
        around_calls(part, lambda call, engine=engine: (engine, call())[1])
        part.__dict__["_mesh_3d_engine"] = engine
    around_forward(learner.net, lambda call: (engine, call())[1])
    shadow(learner, "log", engine)
    shadow(learner.mean, "compute", engine)
    return learner


def test_a_copy_is_the_users_own(learner: Learner, made: list[tuple[nn.Module, str]]) -> None:
    copied = copy.deepcopy(learner)
    assert made == [(copied, "")]
    assert [type(part) for part in copied.modules()] == [type(part) for part in Learner().modules()]
    assert vars(copied.net).keys() == vars(Net()).keys()
    assert copied.net.tied is copied.net.layer
    assert copied.net.sizes is not learner.net.sizes
    assert copied.net.act.__self__ is copied.net
    value = torch.ones(1, 2)
    assert torch.equal(copied.net(value), learner.net(value))
    copied.mean.update(3.0)
    assert copied.mean.compute() == 3
    assert copied.log.__self__ is copied


def test_a_copy_of_a_part(learner: Learner, made: list[tuple[nn.Module, str]]) -> None:
    layers = copy.deepcopy({"one": learner.net.layer, "two": learner.net})
    assert layers["one"] is layers["two"].get_submodule("layer")
    assert [name for _, name in made] == ["net.layer", "net"]


def test_hooks_of_the_user_stay(learner: Learner) -> None:
    seen: list[str] = []
    learner.net.register_forward_hook(lambda *args: seen.append("user"))
    ours: Any = lambda *args: seen.append("library")  # noqa: E731
    ours.__module__ = "lightning_3d.parallel"
    learner.net.register_forward_hook(ours)
    copy.deepcopy(learner.net)(torch.ones(1, 2))
    assert seen == ["user"]


def test_a_forward_that_the_user_has_set_stays() -> None:
    net: Any = Net()
    net.forward = lambda value: value + 1
    serve_copying(net, "", lambda *args: None)
    around_forward(net, lambda call: 2 * call())
    assert net(torch.ones(())) == 4
    assert copy.deepcopy(net)(torch.ones(())) == 2


def test_a_way_of_copying_of_its_own_is_kept() -> None:
    class Own(nn.Module):
        def __deepcopy__(self, memo: Any) -> Own:
            made = Own()
            made.mark = "own"  # type: ignore[assignment]
            return made

    net = Own()
    serve_copying(net, "", lambda *args: None)
    assert copy.deepcopy(net).mark == "own"


def test_a_module_is_gone_with_the_last_who_holds_it() -> None:
    net = nn.Linear(2, 2)
    serve_copying(net, "", lambda *args: None)
    reference = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert reference() is None
    finally:
        gc.enable()
