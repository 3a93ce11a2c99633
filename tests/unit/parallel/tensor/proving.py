"""What tests of proofs say often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.parallel.tensor.proof.ranks import StepCall
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
