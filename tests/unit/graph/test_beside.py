from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_3d.graph.beside import kept_beside


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)


class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Pair()


def found(module: nn.Module, **attributes: Any) -> list[str]:
    return list(kept_beside([SimpleNamespace(**attributes)], module).names)


def test_a_copy_of_the_whole_is_found_whatever_its_values() -> None:
    module = Learner()
    assert found(module, average=AveragedModel(module), other=Learner()) == ["", ""]


def test_parts_are_copies_by_their_values_or_in_an_average() -> None:
    module = Learner()
    average = AveragedModel(module.model)
    nn.init.zeros_(average.module.second.weight)
    assert found(module, average=average) == ["model"]
    assert found(module, teachers=[{"slow": copy.deepcopy(module.model)}]) == ["model"]
    assert found(module, inside=nn.ModuleList([copy.deepcopy(module.model)])) == ["model"]


def test_what_is_alike_by_chance_is_no_copy() -> None:
    module = Learner()
    same_layer = copy.deepcopy(module.model.second)
    assert found(module, probe=Pair(), layer=same_layer, other=nn.Sequential(nn.Linear(4, 4))) == []


def test_the_module_itself_and_its_parts_are_no_copies() -> None:
    module = Learner()
    assert found(module, whole=module, momenta={module.model: 0.1}, parts=[module.model]) == []


def test_each_is_found_once() -> None:
    module = Learner()
    average = AveragedModel(module)
    assert found(module, one=average, other=[average, average]) == [""]


@pytest.mark.parametrize("of", ["named_parameters", "state_dict"])
def test_tensors_by_name(of: str) -> None:
    module = Learner()
    tensors = {name: tensor.detach().clone() for name, tensor in dict(getattr(module, of)()).items()}
    beside = kept_beside([SimpleNamespace(shadow=tensors)], module)
    assert beside.names == tuple(tensors)
    assert all(holder[at] is tensors[name] for (holder, at), name in beside.tensors)


def test_tensors_in_order() -> None:
    module = Learner()
    tensors = [parameter.detach().clone() for parameter in module.parameters()]
    assert found(module, shadow=tensors) == [name for name, _ in module.named_parameters()]
    assert found(module, shadow=tensors[:-1]) == []


def test_other_tensors() -> None:
    module = Learner()
    assert (
        found(module, seen={"loss": torch.zeros(()), "model.second.weight": torch.zeros(3)}, few=[torch.ones(4)]) == []
    )
