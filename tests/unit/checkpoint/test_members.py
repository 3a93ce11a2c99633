from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_3d.checkpoint.members import Members, all_members, names_of, take_absent
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.errors import CheckpointError


def model(*absent: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name in absent:
        place, _, key = name.partition(".")
        setattr(module[int(place)], key, nn.Parameter(torch.empty(2, 2, device="meta")))
    return module


def test_groups_remember_what_was_in_them() -> None:
    module = model("0.weight", "1.weight")
    groups = [{"params": [*module[1].parameters()]}, {"params": [*module[0].parameters()][:1]}]
    optimizer = torch.optim.Adagrad(groups)
    lists = [group["params"] for group in optimizer.param_groups]
    members = take_absent(module, optimizer)
    assert members == (Members(names=("1.weight", "1.bias")), Members(names=("0.weight",)))
    assert names_of(module, optimizer) == [["1.bias"], []]
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert all(group["params"] is each for group, each in zip(optimizer.param_groups, lists, strict=True))
    # Torch knows no parameter for state that is left behind.
    assert [*optimizer.state_dict()["state"]] == [0]
    state = optimizer_state(module, optimizer, taken_from=members)
    assert [group["params"] for group in state["param_groups"]] == [["1.weight", "1.bias"], ["0.weight"]]


def test_groups_that_come_later_or_anew() -> None:
    module = model("0.weight", "1.weight")
    optimizer = torch.optim.SGD([*module[0].parameters()], lr=0.1)
    first = take_absent(module, optimizer)
    optimizer.add_param_group({"params": [*module[1].parameters()]})
    later = Members(names=("1.weight", "1.bias"))
    assert all_members(module, optimizer, first) == [*first, later]
    both = take_absent(module, optimizer, first)
    assert both == (*first, later)
    assert take_absent(module, optimizer, both) == both
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [module[1].bias, module[0].bias]}]
    assert take_absent(module, optimizer, both) == (Members(names=("1.bias", "0.bias")),)
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [*module[1].parameters()]}]
    assert take_absent(module, optimizer, both) == (later,)


def test_names_of_the_user() -> None:
    module = model("0.weight")
    optimizer = torch.optim.SGD(((f"net.{name}", parameter) for name, parameter in module.named_parameters()), lr=0.1)
    members = take_absent(module, optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["net.0.bias", "net.1.weight", "net.1.bias"]
    (group,) = optimizer_state(module, optimizer, taken_from=members)["param_groups"]
    assert group["param_names"] == ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert Members.of(["1.bias"], {}).group(group) == {**without_names(group), "params": ["1.bias"]}


def without_names(group: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key != "param_names"}


def test_parameters_of_others_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(CheckpointError, match="steps 1 parameters that are not in the module"):
        names_of(model(), optimizer)
