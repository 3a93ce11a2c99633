"""Plans of models, and what they say of each weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from tests.parity.catalog import build, global_batches


def plan(module: L.LightningModule, batch: Any, size: int, **options: Any) -> TensorPlan:
    return find_tensor_plan(
        module,
        lambda: module.training_step(batch, 0),
        parameters=parameter_table(module),
        stacks=find_stacks(module),
        size=size,
        **options,
    )


def plan_of(name: str, size: int, **options: Any) -> TensorPlan:
    return plan(build(name), global_batches(name, 1, 4)[0], size, **options)


def styles(found: TensorPlan, prefix: str) -> dict[str, str]:
    """Style and layout of each parameter below a module that is cut; weights that are whole, by their reason."""
    shown = {}
    for row in found.rows:
        if row.name.startswith(prefix) and (row.layout is not None or row.reason):
            what = f"{row.style} {row.layout}" if row.layout is not None else row.reason
            shown[row.name.removeprefix(prefix)] = what
    return shown


class Small(L.LightningModule):
    """Any model on hidden states or ids, with a loss that asks nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.model(batch)
        return output.square().mean() if isinstance(output, Tensor) else output


def states(width: int = 32) -> Tensor:
    return torch.zeros(2, 6, width)


def small_plan(model: nn.Module, size: int = 2, batch: Tensor | None = None, **options: Any) -> TensorPlan:
    return plan(Small(model), states() if batch is None else batch, size, **options)


class Pair(nn.Module):
    """A column and a row weight with something between."""

    def __init__(self, between: Callable[[Tensor], Tensor], inner: int = 64, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(inner)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Both(nn.Module):
    """A pair that can be cut, then what is tested: so that there always is a plan."""

    def __init__(self, tested: nn.Module) -> None:
        super().__init__()
        self.plain, self.tested = Pair(F.gelu), tested

    def forward(self, x: Tensor) -> Any:
        return self.tested(self.plain(x))


def reasons(model: nn.Module, size: int = 2, **options: Any) -> dict[str, str]:
    found = small_plan(Both(model), size, **options)
    assert styles(found, "model.plain.") == {
        "up.weight": "column dim 0",
        "up.bias": "column dim 0",
        "down.weight": "row dim 1",
    }
    return styles(found, "model.tested.")
