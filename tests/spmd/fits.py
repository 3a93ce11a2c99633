"""Trainings on several processes and on one, and what they must have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from tests.parity.measure import FP64, Difference, Record, Recorder, compare
from tests.spmd.pool import run_spmd

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One training.

    Attributes:
        make: Builds the module; it logs "train_loss" as `tests.parity.models.Learner` does.
        batches: Batches of all data ranks together.
        strategy: Arguments of Mesh3DStrategy.
        trainer: More arguments of the Trainer.
        precision: Name of the precision, or a plugin.
    """

    make: Callable[[], LightningModule]
    batches: tuple[Any, ...]
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    precision: Any = "64-true"

    def on_one_device(self, world: int) -> Fit:
        """The same training with all degrees 1 and the same global micro-batches."""
        return replace(self, strategy={"num_microbatches": world * self.strategy.get("num_microbatches", 1)})


def share(value: Any, rank: int, world: int) -> Any:
    """This rank's part of a batch of all ranks: equal slices of every tensor and list."""
    if isinstance(value, (Tensor, list)):
        size = len(value) // world
        return value[rank * size : (rank + 1) * size]
    if isinstance(value, dict):
        return {key: share(item, rank, world) for key, item in value.items()}
    return tuple(share(item, rank, world) for item in value)


def trainer(world: int, *callbacks: Callback, strategy: Any = None, **options: Any) -> Trainer:
    """A quiet Trainer on ``world`` processes; ``strategy`` is one, or arguments of ours."""
    if strategy is None or isinstance(strategy, dict):
        strategy = Mesh3DStrategy(**(strategy or {}))
    return L.Trainer(**(QUIET | options), devices=world, strategy=strategy, callbacks=list(callbacks))


def loader(batches: Any) -> DataLoader[Any]:
    """A loader of ready batches."""
    return DataLoader(list(batches), batch_size=None)


def fit(rank: int, world: int, *cases: Fit) -> list[Record]:
    """Runs trainings one after the other in one process."""
    return [_fit(rank, world, case) for case in cases]


def _fit(rank: int, world: int, case: Fit) -> Record:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    module = case.make()
    # A plugin that was used belongs to its Trainer.
    precision = Mesh3DPrecision(case.precision) if isinstance(case.precision, str) else case.precision()
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, **case.trainer}
    callbacks = [make() for make in options.pop("callbacks", ())]
    run = trainer(world, recorder, *callbacks, strategy=case.strategy, plugins=precision, **options)
    run.fit(module, loader(share(batch, rank, world) for batch in case.batches))
    return recorder.record


def assert_equal_to_one_device(world: int, *cases: Fit, bounds: Difference = FP64, timeout: float = 90) -> list[Record]:
    """Runs trainings on ``world`` processes and on one, compares them, and returns the records of rank 0."""
    expected: dict[str, Record] = {}
    references = {_key(case, world): case.on_one_device(world) for case in cases}
    for key, record in zip(references, run_spmd(fit, 1, *references.values(), timeout=timeout)[0], strict=True):
        expected[key] = record
    ranks = run_spmd(fit, world, *cases, timeout=timeout)
    for index, case in enumerate(cases):
        for rank in range(world):
            found = compare(ranks[rank][index], expected[_key(case, world)])
            assert found.within(bounds), f"rank {rank}, {case.make.__name__}, {case.strategy}, {case.trainer}: {found}"
    return list(ranks[0])


def _key(case: Fit, world: int) -> str:
    return f"{case.make.__name__} {case.trainer} {case.precision} {case.on_one_device(world).strategy}"


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same random numbers everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
