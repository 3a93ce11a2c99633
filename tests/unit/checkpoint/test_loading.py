from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.layout import module_state
from lightning_3d.checkpoint.loading import serve_loading
from lightning_3d.shards.absent import Absent, Arrivals, Elsewhere, absent_parameter
from tests.spmd.packed import Stack
from tests.unit.shards.test_resting import resting

State = dict[str, Any]


def of_one_device(module: nn.Module) -> State:
    """What one device has saved."""
    torch.manual_seed(1)
    return dict(Stack().state_dict())


def as_it_lies(module: nn.Module) -> State:
    return copy.deepcopy(dict(module.state_dict()))


def as_saved(module: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in module_state(module).items()}


@pytest.mark.parametrize("state_of", [of_one_device, as_it_lies, as_saved])
@pytest.mark.parametrize("world", [(1, 2), (2, 2), (2, 1)], ids=["tensor", "data x tensor", "data"])
def test_every_form_of_a_state_comes_back(state_of: Callable[[nn.Module], State], world: tuple[int, int]) -> None:
    with resting(*world, rank=world[0] * world[1] - 1) as module:
        serve_loading(module)
        before = {name: local(parameter).clone() for name, parameter in module.named_parameters()}
        state = state_of(module)
        for parameter in module.parameters():
            parameter.mul_(2)
        module.load_state_dict(state)
        for name, parameter in module.named_parameters():
            assert torch.equal(local(parameter), before[name]), name


def local(parameter: Any) -> Tensor:
    found: Tensor = parameter._local_tensor if hasattr(parameter, "_local_tensor") else parameter
    return found


def test_another_shape_is_an_error_of_torch() -> None:
    with resting(1, 2) as module:
        serve_loading(module)
        state = of_one_device(module) | {"words.weight": torch.zeros(3, 3)}
        with pytest.raises(RuntimeError, match=r"size mismatch for words.weight"):
            module.load_state_dict(state)


def test_parameters_of_other_ranks_take_nothing_and_do_not_warn() -> None:
    layer = nn.Linear(2, 2)
    elsewhere = Elsewhere(name="weight", ranks=frozenset({1}), rank=0)
    layer.weight = absent_parameter(layer.weight, elsewhere, torch.device("cpu"), Arrivals())
    serve_loading(layer)
    layer.load_state_dict(nn.Linear(2, 2).state_dict())
    assert isinstance(layer.weight, Absent)
