"""What tests of proofs say often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.parallel.tensor.proof.prove import prove
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof
from tests.parity.tensor_models import TENSOR_MODELS


def known(name: str, samples: int = 4) -> tuple[L.LightningModule, StepCall]:
    """Returns one of the parity models and its training step."""
    build, make = TENSOR_MODELS[name]
    torch.manual_seed(0)
    module = build()
    return module, training(make(samples, torch.Generator().manual_seed(0)))


def training(batch: Any) -> StepCall:
    return StepCall(method="training_step", args=(batch, 0))


def planned(module: L.LightningModule, call: StepCall, size: int = 2, **options: Any) -> TensorPlan:
    """Returns the plan that the trace of a step finds."""
    step: Callable[..., Any] = getattr(module, call.method)
    return find_tensor_plan(
        module,
        lambda: step(*call.args),
        parameters=parameter_table(module),
        stacks=find_stacks(module),
        size=size,
        **options,
    )


class Net(L.LightningModule):
    """A stack of two-layer blocks between two maps, as long as needed; ``loss`` may be replaced."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch(samples: int = 4) -> Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))


def proved(module: L.LightningModule, call: StepCall, **options: Any) -> Proof:
    found = prove(module, call, planned(module, call), **options)
    assert isinstance(found, Proof), found
    return found


def proved_by_plan_of_net(module: Net) -> Proof:
    call = training(batch())
    found = prove(module, call, planned(Net(), call))
    assert isinstance(found, Proof), found
    return found
