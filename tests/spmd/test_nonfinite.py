"""Losses and gradients that are not finite: left out, or an error, on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.errors import NonFiniteError
from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

MESHES = {
    "data 2, zero 0": (2, {"zero_stage": 0}),
    "data 2, zero 3": (2, {"zero_stage": 3}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "2 x 2 x 2": (8, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
}
BAD = 2


class Breaks(Module):
    """Has one bad step: its loss, or the gradient of one weight alone, is not finite."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.seen: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        bad = float("nan") if batch_idx == BAD else 1.0
        if self.what == "loss":
            return loss * bad
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # Hooks see what there is.
        norms = [float(each.grad.norm()) for each in self.parameters() if each.grad is not None]
        self.seen.append(all(map(math.isfinite, norms)))

    def on_after_backward(self) -> None:
        if self.what == "gradient" and self.trainer.global_step == BAD:
            weight = self.net.blocks[1].up.weight
            if weight.grad is not None:
                weight.grad.mul_(float("inf"))


def fit(rank: int, world: int, strategy: dict[str, Any], what: str) -> tuple[list[bool], dict[str, Tensor]]:
    L.seed_everything(5, verbose=False)
    module = Breaks(what)
    run = trainer(world, strategy={**strategy, "on_nonfinite": "skip"}, max_epochs=1, precision="64-true")
    run.fit(module, DataLoader(Samples(48), 8 // run.strategy.data_size), DataLoader(Samples(8), 2))
    return module.seen, run.strategy.full_state_dict()


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    "mesh", ["data 2, zero 3", "pipeline 2", *map(more, ("data 2, zero 0", "tensor 2", "2 x 2 x 2"))]
)
def test_a_bad_step_is_left_out_by_all(mesh: str, what: str) -> None:
    world, strategy = MESHES[mesh]
    ((seen, expected),) = run_spmd(fit, 1, {}, what)
    assert seen == [index != BAD for index in range(6)]
    for own, state in run_spmd(fit, world, strategy, what):
        assert own == seen
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


def raises(rank: int, world: int, strategy: dict[str, Any], what: str) -> str:
    run = trainer(world, strategy={**strategy, "on_nonfinite": "raise"}, max_epochs=1, precision="64-true")
    with pytest.raises(NonFiniteError) as caught:
        run.fit(Breaks(what), DataLoader(Samples(48), 4), DataLoader(Samples(8), 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "what", "text"),
    [
        ("data 2, zero 3", "loss", "the loss is not finite in step 2, first on rank 0 (data rank 0"),
        ("pipeline 2", "gradient", "the gradient of 'net.blocks.1.up.weight' is not finite in step 2, first on rank 0"),
    ],
)
def test_a_bad_step_may_be_an_error_on_every_rank(mesh: str, what: str, text: str) -> None:
    world, strategy = MESHES[mesh]
    for told in run_spmd(raises, world, strategy, what):
        assert told.startswith(text)
