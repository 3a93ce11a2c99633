"""Which samples loops take on a mesh, and on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from tests.features.here import Here
from tests.features.modules import Module, metrics, weights
from tests.features.table import Seen


def numbers(batch: Any) -> Any:
    """Returns the numbers of the samples of a batch, in its structure."""
    if isinstance(batch, dict):
        return {name: numbers(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], Tensor):
        return [numbers(value) for value in batch]
    return None if batch is None else [round(100 * float(value)) for value in batch[0][:, 0]]


class Sees(Callback):
    """Writes down which samples a loop takes, epoch by epoch, batch by batch."""

    def __init__(self) -> None:
        self.epochs: dict[str, list[list[Any]]] = {}

    def _begin(self, stage: str) -> None:
        self.epochs.setdefault(stage, []).append([])

    def _see(self, stage: str, batch: Any) -> None:
        self.epochs[stage][-1].append(numbers(batch))

    def on_train_epoch_start(self, *_: Any) -> None:
        self._begin("train")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._see("train", batch)

    def on_validation_start(self, *_: Any) -> None:
        self._begin("validate")

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self._see("validate", batch)


def of_data_ranks(here: Here, mine: Any, *, first: bool = False) -> list[Any]:
    """Returns what each data rank has; on one device it is alone.

    Args:
        here: Where it runs.
        mine: What this rank has.
        first: Only the first of each model group has it; else all have the same.
    """
    every: list[Any] = [mine] * here.mesh.world
    if here.mesh.world > 1:
        dist.all_gather_object(every, mine)
    each = here.mesh.world // here.mesh.data
    for rank, other in enumerate(every):
        expected = every[rank - rank % each]
        assert first or other == expected, f"rank {rank} has {other}, the first of its model group {expected}"
    return every[::each]


def joined(here: Here, batches: Sequence[list[int]], **options: bool) -> list[list[int]]:
    """Returns the batches of steps: the parts of all data ranks, one behind the other."""
    hands = of_data_ranks(here, list(batches), **options)
    longest = max(map(len, hands))
    return [[number for hand in hands if at < len(hand) for number in hand[at]] for at in range(longest)]


def dealt(here: Here, batches: Sequence[list[int]], **options: bool) -> list[list[int]]:
    """Returns whole batches in the order in which they were dealt out to the data ranks."""
    hands = of_data_ranks(here, list(batches), **options)
    return [hand[at] for at in range(max(map(len, hands))) for hand in hands if at < len(hand)]


def all_batches(here: Here, sees: Sees, together: Callable[[Here, Any], list[Any]] = joined) -> dict[str, list[Any]]:
    return {
        stage: [batch for epoch in found for batch in together(here, epoch)] for stage, found in sees.epochs.items()
    }


def fit(here: Here, train: Any, validate: Any = None, module: Module | None = None, **options: Any) -> Seen:
    """Trains two epochs on a loader, and says what it gave and what came out."""
    L.seed_everything(5, verbose=False)
    sees = Sees()
    trainer = here.trainer(sees, **({"max_epochs": 2, "num_sanity_val_steps": 0} | options))
    trainer.fit(module or Module(), train, validate)
    return {
        "batches": all_batches(here, sees),
        "metrics": metrics(trainer),
        "weights": weights(trainer),
    }
