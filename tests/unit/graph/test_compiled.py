from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.graph.compiled import compiled_parts


@torch.compile(backend="eager")
def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@torch.compile(backend="eager")
def never_used(output: Tensor) -> Tensor:
    return output


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def training_step(self, batch: Tensor) -> Tensor:
        return F.relu(self.model(batch)).mean()


class Decorated(Base):
    @torch.compile(backend="eager")
    def logits(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def training_step(self, batch: Tensor) -> Tensor:
        return sum(loss_of(each) for each in [self.logits(batch)])


def test_a_plain_module_has_none() -> None:
    assert compiled_parts(Base()) == ()


def test_modules_have_their_names() -> None:
    module = Base()
    module.model[0].compile(backend="eager")
    module.model[1] = torch.compile(module.model[1], backend="eager")
    assert compiled_parts(module) == ("model.0", "model.1")
    module.model = torch.compile(module.model, backend="eager")
    assert compiled_parts(module) == ("model", "model.0", "model.1")


def test_methods_and_functions_that_they_name() -> None:
    assert compiled_parts(Decorated()) == ("Decorated.logits", "loss_of")


def test_a_subclass_has_those_of_its_bases() -> None:
    class Derived(Decorated):
        def training_step(self, *args: Any) -> Tensor:
            return super().training_step(*args)

    assert compiled_parts(Derived()) == ("Decorated.logits", "loss_of")


def test_functions_that_a_module_holds() -> None:
    module = Base()
    module.step = torch.compile(module.training_step, backend="eager")
    module.model[0].act = torch.compile(F.relu, backend="eager")
    module.compile(backend="eager")
    assert compiled_parts(module) == ("step", "Base", "model.0.act")
