from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_3d.errors import ModuleError
from lightning_3d.strategy.setup.refusals import refuse_own_training


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(Plain):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Warms(Plain):
    """Changes the learning rate, and leaves the rest as it is."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step(closure=optimizer_closure)


class Perturbs(Plain):
    """Goes backward a second time, in a closure of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def again() -> None:
            self.manual_backward(self.layer.weight.sum())

        again()
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Manual, "Manual sets automatic_optimization=False"),
        (Backward, "Backward overrides backward"),
        (Perturbs, "Perturbs runs backward in optimizer_step"),
    ],
)
def test_trainings_of_their_own_are_refused(kind: type[Plain], text: str) -> None:
    with pytest.raises(ModuleError, match=text):
        refuse_own_training(kind())


@pytest.mark.parametrize("kind", [Plain, Warms])
def test_others_are_not(kind: type[Plain]) -> None:
    refuse_own_training(kind())
