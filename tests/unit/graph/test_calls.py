from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_3d.graph.calls import Call, around_calls, around_forward, own_attributes, plain_calls, shadow


def doubled(call: Callable[[], Any]) -> Any:
    return 2 * call()


def test_calls_go_through_the_handler_and_nothing_else_changes() -> None:
    layer = nn.Linear(2, 2)
    other, inputs = copy.deepcopy(layer), torch.ones(1, 2)
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *args: seen.append("before"))
    layer.register_forward_hook(lambda *args: seen.append("after"))
    around_calls(layer, lambda call: (seen.append("handler"), doubled(call))[1])
    assert torch.equal(layer(inputs), 2 * other(inputs))
    assert seen == ["handler", "before", "after"]
    assert torch.equal(layer.forward(inputs), other(inputs))
    assert isinstance(layer, nn.Linear)
    assert (type(layer).__name__, type(layer).__qualname__, type(layer).__module__) == (
        "Linear",
        "Linear",
        nn.Linear.__module__,
    )
    assert list(layer.state_dict()) == list(other.state_dict())


def test_a_second_handler_replaces_the_first_and_both_can_be_taken_away() -> None:
    layer, inputs = nn.Identity(), torch.ones(())
    around_calls(layer, doubled)
    kind = type(layer)
    around_calls(layer, lambda call: call() + 10)
    assert type(layer) is kind
    assert layer(inputs) == 11
    plain_calls(layer)
    assert layer(inputs) == 1
    around_calls(layer, doubled)
    assert layer(inputs) == 2


def test_a_class_with_its_own_call_keeps_it() -> None:
    class Named(nn.Module):
        def __call__(self, *args: Any, name: str) -> str:
            return f"{name}{args}"

    module = Named()
    around_calls(module, doubled)
    assert module(1, name="a") == "a(1,)a(1,)"


def test_other_instances_are_left_alone() -> None:
    one, two = nn.Identity(), nn.Identity()
    around_calls(one, doubled)
    assert two(1) == 1
    assert type(two) is nn.Identity


def test_handlers_see_and_change_the_arguments() -> None:
    class Scaled(nn.Module):
        def forward(self, inputs: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
            return factor * inputs

    def tripled(call: Call) -> Any:
        return call.function(*call.args, **{**call.kwargs, "factor": 3.0})

    module = Scaled()
    around_calls(module, tripled)
    assert module(torch.ones(())) == 3
    assert module.forward(torch.ones(())) == 1


def test_forward_goes_through_its_handler_inside_the_hooks() -> None:
    layer, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    plain, seen = layer(inputs), []
    around_calls(layer, lambda call: (seen.append("call"), call())[1])
    around_forward(layer, lambda call: (seen.append("forward"), call())[1])
    layer.register_forward_pre_hook(lambda *args: seen.append("before"))
    assert torch.equal(layer(inputs), plain)
    assert seen == ["call", "before", "forward"]
    assert list(inspect.signature(layer.forward).parameters) == ["input"]
    other = copy.deepcopy(layer)
    nn.init.zeros_(layer.weight)
    assert torch.equal(other(inputs), plain)
    around_forward(layer, doubled)
    assert torch.equal(layer(inputs), 2 * nn.functional.linear(inputs, layer.weight, layer.bias))
    plain_calls(layer)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_a_forward_of_the_instance_stays() -> None:
    module = nn.Identity()
    module.forward = lambda inputs: inputs + 1
    around_forward(module, doubled)
    assert module(1) == 4


def test_shadowed_methods_come_back() -> None:
    module = L.LightningModule()
    put_first_back = shadow(module, "log", lambda name, value: "first")
    put_second_back = shadow(module, "log", lambda name, value: "second")
    assert module.log("a", 1) == "second"
    put_second_back()
    assert module.log("a", 1) == "first"
    put_first_back()
    assert "log" not in vars(module)
    with pytest.raises(KeyError):
        put_first_back()


def test_a_copy_knows_what_its_handlers_stand_before() -> None:
    layer = nn.Linear(2, 2)
    around_forward(layer, doubled)
    shadow(layer, "extra_repr", lambda: "")
    for each in (layer, copy.deepcopy(layer)):
        assert own_attributes(each).keys() == vars(nn.Linear(2, 2)).keys()
