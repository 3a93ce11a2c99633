from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_3d.errors import ModuleError
from lightning_3d.strategy.life import (
    check_optimizers,
    check_recorded,
    check_untouched,
    compiled_notice,
    optimizer_parameters,
)


def test_plain_modules_are_accepted() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_untouched(module)
    check_recorded(module, None)
    check_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])


def test_meta_parameters_without_a_recording_are_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 3)
    with pytest.raises(ModuleError, match="2 parameters, the first 'weight', are on the meta device"):
        check_recorded(module, None)


def test_optimizers_of_other_parameters_are_refused() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    good = torch.optim.SGD(module.parameters(), lr=0.1)
    stale = torch.optim.AdamW([*other.parameters(), module.weight])
    with pytest.raises(ModuleError, match=r"optimizer 1 \(AdamW\) holds 2 parameters"):
        check_optimizers(module, [good, stale])


def test_parameters_of_optimizers_come_once_and_in_order() -> None:
    module = nn.Linear(2, 2)
    first = torch.optim.SGD([{"params": [module.bias]}, {"params": [module.weight]}], lr=0.1)
    second = torch.optim.SGD([module.weight], lr=0.1)
    found = optimizer_parameters([first, second])
    assert [id(parameter) for parameter in found] == [id(module.bias), id(module.weight)]


def test_the_notice_of_compiled_parts_names_some_of_them() -> None:
    assert "left out of model, Net.forward, since" in compiled_notice(["model", "Net.forward"])
    assert "left out of 0, 1, 2, 3, 4, since" in compiled_notice(list(map(str, range(5))))
    many = compiled_notice(list(map(str, range(7))))
    assert "left out of 0, 1, 2, 3, 4 and 2 more, since" in many
    assert "Mesh3DStrategy(compile=True)" in many
