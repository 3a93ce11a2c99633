from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.checkpoint import members
from lightning_3d.checkpoint.members import Members, all_members, members_of, names_of
from lightning_3d.errors import CheckpointError
from lightning_3d.shards.presence import Presence


def model(*absent: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name in absent:
        place, _, key = name.partition(".")
        setattr(module[int(place)], key, nn.Parameter(torch.empty(2, 2, device="meta")))
    return module


def sgd(module: nn.Module, *groups: Sequence[str], named: bool = False) -> torch.optim.Optimizer:
    parameters = dict(module.named_parameters())
    lists = [[(f"net.{name}", parameters[name]) if named else parameters[name] for name in names] for names in groups]
    return torch.optim.SGD([{"params": each} for each in lists], lr=0.1)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Presence, list[Any]]]:
    """A pipeline of two ranks; what the second one answers is put into the list."""
    answers: list[Any] = []
    monkeypatch.setattr(members, "gather", lambda group, value: [value, answers.pop(0)])
    group: Any = None
    yield (
        Presence(group=group, rank=0, device=torch.device("cpu"), holders={}, modules={}, others=0),
        answers,
    )
    assert not answers


def test_without_a_pipeline_groups_are_what_they_are() -> None:
    module = model()
    optimizer = sgd(module, ["1.bias", "0.weight"], ["0.bias"])
    assert all_members(module, optimizer, None) == members_of(module, optimizer)
    assert members_of(module, optimizer) == (Members(names=("1.bias", "0.weight")), Members(names=("0.bias",)))
    assert names_of(module, optimizer) == [["1.bias", "0.weight"], ["0.bias"]]


def test_what_was_recorded_holds_while_groups_are_the_same(pipeline: tuple[Presence, list[Any]]) -> None:
    presence, answers = pipeline
    module = model("1.weight")
    recorded = (Members(names=("1.weight", "1.bias", "0.bias")), Members(names=("0.weight",)))
    optimizer = sgd(module, ["1.bias", "0.bias"], ["0.weight"])
    answers.append(([True, True], (Members(names=("1.weight",)), Members(names=()))))
    assert all_members(module, optimizer, presence, recorded) == recorded
    # The other rank has a group of another kind by now.
    answers.append(([False, True], (Members(names=("1.weight", "0.weight")), Members(names=()))))
    joined = Members(names=("0.weight", "0.bias", "1.weight", "1.bias"))
    assert all_members(module, optimizer, presence, recorded) == (joined, recorded[1])


def test_groups_that_came_later(pipeline: tuple[Presence, list[Any]]) -> None:
    presence, answers = pipeline
    module = model("1.weight")
    # Absent ones are still in it: on every rank it is the same.
    optimizer = sgd(module, ["1.weight", "0.bias"])
    answers.append(([False], (Members(names=("1.weight", "0.bias")),)))
    assert all_members(module, optimizer, presence) == (Members(names=("1.weight", "0.bias")),)
    optimizer = sgd(module, ["1.bias", "0.bias"], named=True)
    answers.append(([False], (Members(names=("1.weight",), own_names=("net.1.weight",)),)))
    names = ("0.bias", "1.weight", "1.bias")
    joined = Members(names=names, own_names=tuple(f"net.{name}" for name in names))
    assert all_members(module, optimizer, presence) == (joined,)


def test_names_of_the_user_stay_with_their_parameters() -> None:
    module = model()
    optimizer = sgd(module, ["1.bias", "0.weight"], named=True)
    (group,) = members_of(module, optimizer)
    assert group.own_names == ("net.1.bias", "net.0.weight")
    options = {"lr": 2.0, "params": [0], "param_names": ["strange"]}
    assert group.group(options) == {
        "lr": 2.0,
        "params": ["1.bias", "0.weight"],
        "param_names": ["net.1.bias", "net.0.weight"],
    }
    assert Members(names=("1.bias",)).group(options) == {"lr": 2.0, "params": ["1.bias"]}


def test_parameters_of_others_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(CheckpointError, match="steps 1 parameters that are not in the module"):
        names_of(model(), optimizer)
