from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.strategy.idle import idle_optimizers


class Adversaries(LightningModule):
    """Two optimizers in turn, by hand."""

    def __init__(self, configured: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.configured = configured

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.one.parameters(), lr=0.5)
        two = torch.optim.SGD(self.two.parameters(), lr=0.25)
        schedule = torch.optim.lr_scheduler.StepLR(one, 1)
        return {
            "list": [one, two],
            "pair": ([one, two], [schedule]),
            "mappings": ({"optimizer": one, "lr_scheduler": schedule}, {"optimizer": two}),
            "one": one,
            "mapping": {"optimizer": one, "lr_scheduler": schedule},
        }[self.configured]


@pytest.mark.parametrize("configured", ["list", "pair", "mappings"])
def test_as_many_optimizers_as_are_configured(configured: str) -> None:
    module = Adversaries(configured)
    with idle_optimizers(module):
        first, second = module.optimizers()
        assert [o.param_groups[0]["lr"] for o in (first, second)] == [0.5, 0.25]
        module.toggle_optimizer(first)
        module.manual_backward(torch.zeros(()))
        module.clip_gradients(first, gradient_clip_val=0.5)
        first.step()
        first.zero_grad()
        module.lr_schedulers().step()
        module.untoggle_optimizer(first)
    assert "optimizers" not in module.__dict__


@pytest.mark.parametrize("configured", ["one", "mapping"])
def test_one_optimizer_is_no_list(configured: str) -> None:
    module = Adversaries(configured)
    before = module.one.weight.clone()
    with idle_optimizers(module):
        optimizer = module.optimizers()
        assert optimizer.step(lambda: 3) == 3
    assert torch.equal(module.one.weight, before)


def test_nothing_happens_with_automatic_optimization() -> None:
    module = Adversaries("one")
    module.automatic_optimization = True
    with idle_optimizers(module):
        assert "optimizers" not in module.__dict__
