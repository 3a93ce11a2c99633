"""Modules are cut to their first blocks, and what none of those does is told."""

import pytest
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.verify.subject import GivenSubject, check_cut, cut_stacks, shrink


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=index < 3) for index in range(4))


class Late(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def test_the_first_blocks_stay_and_other_kinds_are_told() -> None:
    module = Net()
    (cut,) = cut_stacks(module, 2)
    assert len(module.blocks) == 2
    assert str(cut) == "blocks: the first 2 of 4 Linear; none like blocks.3 stays"
    assert cut_stacks(module, 2) == []


def test_modules_that_configure_model_makes_are_cut_after_it() -> None:
    module = Late()
    cuts = shrink(module, 1)
    module.configure_model()
    module.configure_model()
    assert len(module.blocks) == 1
    assert [str(cut) for cut in cuts()] == ["blocks: the first 1 of 4 Linear"]


def test_layers_without_a_stack_are_refused() -> None:
    with pytest.raises(PlanError, match="layers=2 finds no stack of blocks in LightningModule"):
        check_cut(LightningModule(), 2, [])
    check_cut(Net(), 8, [])


def test_only_modules_are_verified() -> None:
    with pytest.raises(ConfigError, match="makes a dict, which is no LightningModule"):
        GivenSubject.of(dict, None, 0).build()
