from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_3d.errors import ModuleError
from lightning_3d.strategy.setup.optimizers import AbsentParameters, check_separable


class Half(L.LightningModule):
    """Its second layer lives elsewhere, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4, device="meta", dtype=torch.bfloat16)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.there.weight
        self.decayed = [self.here.weight, self.there.weight]


CPU = torch.device("cpu")


def made(module: Half, make: Any) -> torch.optim.Optimizer:
    absent = AbsentParameters(module)
    with absent.shown(CPU):
        optimizer: torch.optim.Optimizer = make(module)
    absent.take_out([optimizer])
    return optimizer


def test_absent_parameters_are_there_while_optimizers_are_made() -> None:
    module = Half()
    absent = dict(module.named_parameters())
    with AbsentParameters(module).shown(CPU):
        shown = dict(module.named_parameters())
        assert shown.keys() == absent.keys()
        stand_in = module.there.weight
        assert (stand_in.shape, stand_in.dtype, stand_in.device) == ((4, 4), torch.bfloat16, CPU)
        assert stand_in.untyped_storage().nbytes() == 2
        assert module.tied.weight is stand_in is module.decayed[1]
        assert module.here.weight is absent["here.weight"]
    assert all(one is other for one, other in zip(module.parameters(), absent.values(), strict=True))
    assert module.tied.weight is module.there.weight is module.decayed[1]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_groups_keep_what_is_here(options: dict[str, Any]) -> None:
    def make(module: Half) -> torch.optim.Optimizer:
        weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
        biases = [(name, parameter) for name, parameter in module.named_parameters() if parameter.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.5}], lr=0.1, **options)
        optimizer.add_param_group({"params": [parameter for _, parameter in biases]})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return optimizer

    module = Half()
    optimizer = made(module, make)
    groups = optimizer.param_groups
    assert [len(group["params"]) for group in groups] == [1, 1, 1]
    assert groups[0]["params"][0] is module.here.weight
    assert groups[0]["weight_decay"] == 0.5
    module.here(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == {module.here.weight, module.here.bias}


def test_names_and_early_states_go_too() -> None:
    named = made(Half(), lambda module: torch.optim.AdamW(module.named_parameters(), lr=0.1))
    assert named.param_groups[0]["param_names"] == ["here.weight", "here.bias"]
    early = made(Half(), lambda module: torch.optim.Adagrad(module.parameters(), lr=0.1))
    assert len(early.state) == len(early.param_groups[0]["params"]) == 2


def test_an_optimizer_of_others_alone_steps_on_nothing() -> None:
    module = Half()
    optimizer = made(module, lambda module: torch.optim.AdamW(module.there.parameters(), lr=0.1, fused=True))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert optimizer.param_groups[0]["params"] == []
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.05]


def test_freezing_while_optimizers_are_made_lasts() -> None:
    module = Half()
    made(module, lambda module: torch.optim.SGD(module.requires_grad_(False).parameters(), lr=0.1))
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_groups_are_whole_while_a_callback_changes_them() -> None:
    module = Half()
    absent, there, here = AbsentParameters(module), module.there, module.here
    with absent.shown(CPU):
        optimizer = torch.optim.SGD([there.bias, here.weight, there.weight], lr=0.1)
    absent.take_out([optimizer])
    assert optimizer.param_groups[0]["params"] == [here.weight]
    for _ in range(2):
        with absent.in_optimizers([optimizer]):
            found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            assert [id(each) for each in found[:3]] == [id(each) for each in (there.bias, here.weight, there.weight)]
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [here.bias, nn.Parameter(there.weight.clone())]})
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_what_no_pipeline_can_step() -> None:
    check_separable([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)])
    with pytest.raises(ModuleError, match="LBFGS takes all parameters as one vector"):
        check_separable([torch.optim.LBFGS([nn.Parameter(torch.ones(1))])])
