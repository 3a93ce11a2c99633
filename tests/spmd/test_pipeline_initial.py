"""Initial values in a pipeline: those of any other mesh where they are recorded, else those of the first rank."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.marks import more
from tests.spmd.fits import QUIET, loader, share
from tests.spmd.pool import run_spmd
from tests.spmd.speaker import Late, Speaker, words
from tests.spmd.tensor_runs import assert_same

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]


class Start(Callback):
    """Writes down the weights before the first step, and what is absent."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.absent: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.weights = {name: value.clone() for name, value in strategy.full_state_dict().items()}
        self.absent = [name for name, parameter in pl_module.named_parameters() if parameter.is_meta]


def fitted(rank: int, world: int, kind: type[Speaker], seed: int, strategy: dict[str, Any]) -> Any:
    L.seed_everything(seed, verbose=False)
    if kind is not Late:
        torch.manual_seed(seed + rank)
    start, module = Start(), kind()
    if kind is Speaker:
        module.double()
    model = strategy.get("pipeline_parallel_size", 1) * strategy.get("tensor_parallel_size", 1)
    batches = loader(share(batch, rank // model, world // model) for batch in words(2))

    def trainer() -> Trainer:
        return L.Trainer(
            **QUIET,
            devices=world,
            strategy=Mesh3DStrategy(num_microbatches=2, **strategy),
            plugins=Mesh3DPrecision("64-true"),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[start],
            num_sanity_val_steps=0,
        )

    first = trainer()
    first.fit(module, batches)
    found = [start.weights, first.strategy.full_state_dict()]
    if kind is Late:
        # The module is on the mesh already, and what other ranks hold is on the meta device.
        found.append(first.test(module, batches, verbose=False))
    return found, start.absent


MESHES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"pipeline_parallel_size": 2}),
    (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbvzerobubble"}),
    (4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
    (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
)


@pytest.mark.parametrize("kind", [more(Late), Speaker])
def test_initial_values_are_those_of_one_device(kind: type[Speaker]) -> None:
    ((expected, absent),) = run_spmd(fitted, 1, kind, 5, {}, timeout=90)
    assert not absent
    for world, strategy in MESHES:
        ranks = run_spmd(fitted, world, kind, 5, strategy, timeout=90)
        for rank, (found, away) in enumerate(ranks):
            assert_same(found, expected, f"{strategy}, rank {rank}")
            assert all(torch.equal(value, expected[0][name]) for name, value in found[0].items())
            assert away
        assert not set.intersection(*(set(away) for _, away in ranks))
