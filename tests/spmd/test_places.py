"""A run that resumes inside an epoch reads what is left of it: nothing twice, nothing never, on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.features.modules import Module, Samples
from tests.marks import more
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(240),
    # Lightning's notice to callbacks that write elsewhere than before.
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

COUNT, BATCH = 48, 8
Read = list[list[int]]


class Reads(Module):
    """Writes down which samples it was given in each step."""

    def __init__(self, make: Callable[[int], Any], ranks: int) -> None:
        super().__init__()
        self.make, self.ranks = make, ranks
        self.read: Read = []

    def train_dataloader(self) -> Any:
        return self.make(BATCH // self.ranks)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(8), 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) and isinstance(batch[0], list) else [batch]
        self.read.append([round(float(number) * 100) for part in parts for number in part[0][:, 0]])
        return super().training_step(parts[0], batch_idx)


def samples() -> Samples:
    return Samples(COUNT)


def shuffled(size: int) -> Any:
    return DataLoader(samples(), size, shuffle=True)


def in_order(size: int) -> Any:
    return DataLoader(samples(), size)


def by_generator(size: int) -> Any:
    return DataLoader(samples(), size, shuffle=True, generator=torch.Generator().manual_seed(7))


def by_sampler(size: int) -> Any:
    sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(8))
    return DataLoader(samples(), size, sampler=sampler)


def subset(size: int) -> Any:
    return DataLoader(samples(), size, sampler=SubsetRandomSampler(range(0, COUNT, 2)))


def weighted(size: int) -> Any:
    return DataLoader(samples(), size, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT))


class Shuffles(Sampler[int]):
    """Draws from Python's generator, lazily."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        order = list(range(COUNT))
        random.shuffle(order)
        yield from order


def by_python(size: int) -> Any:
    return DataLoader(samples(), size, sampler=Shuffles())


def by_workers(size: int) -> Any:
    return DataLoader(samples(), size, shuffle=True, num_workers=1, persistent_workers=True)


def several(size: int) -> Any:
    # The second one begins anew in the middle of an epoch.
    return [shuffled(size), DataLoader(Samples(4 * BATCH, seed=3), size, shuffle=True)]


class Stream(IterableDataset[Any]):
    """Gives this rank its share."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        ranks = BATCH // self.size
        rank = torch.distributed.get_rank() % ranks if torch.distributed.is_initialized() else 0
        own = samples()
        for start in range(0, COUNT, BATCH):
            yield from (own[start + rank * self.size + index] for index in range(self.size))


def stream(size: int) -> Any:
    return DataLoader(Stream(size), size)


def run(
    rank: int, world: int, make: Callable[[int], Any], strategy: dict[str, Any], directory: Path, resume: str | None
) -> tuple[int, Read]:
    L.seed_everything(5, verbose=False)
    ranks = world // (strategy.get("tensor_parallel_size", 1) * strategy.get("pipeline_parallel_size", 1))
    module = Reads(make, ranks)
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(
        world,
        saver,
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    run.fit(module, ckpt_path=resume)
    return run.strategy.data_rank, module.read


def together(results: list[tuple[int, Read]]) -> Read:
    """What all data ranks have read in each step, in the order of one device."""
    of_ranks = dict(reversed(results))
    return [
        [number for rank in sorted(of_ranks) for number in of_ranks[rank][step]] for step in range(len(results[0][1]))
    ]


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data 2": (2, {"zero_stage": 1}),
    "data 4": (4, {"zero_stage": 3}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "pipeline 2 x data 2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
}
LOADERS = (shuffled, in_order, by_generator, by_sampler, subset, weighted, by_python)


@pytest.mark.parametrize("make", [shuffled, *map(more, LOADERS[1:]), more(by_workers)], ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("first", "second"),
    [("one", "data 2"), ("data 4", "data 2"), ("data 2", "tensor 2"), ("tensor 2", "pipeline 2 x data 2")],
)
@pytest.mark.parametrize("steps", [2, more(6), more(8)])
def test_nothing_is_read_twice_or_never(
    make: Callable[[int], Any], first: str, second: str, steps: int, tmp_path: Path
) -> None:
    (world, strategy), (other_world, other_strategy) = MESHES[first], MESHES[second]
    whole = together(run_spmd(run, world, make, strategy, tmp_path / "a", None))
    saved = str(tmp_path / "a" / f"step={steps}.ckpt")
    rest = together(run_spmd(run, other_world, make, other_strategy, tmp_path / "b", saved))
    assert rest == whole[steps:]


@pytest.mark.parametrize("make", [more(several), stream, more(by_workers)], ids=lambda each: each.__name__)
def test_loaders_of_other_kinds(make: Callable[[int], Any], tmp_path: Path) -> None:
    world, strategy = MESHES["data 2"]
    whole = together(run_spmd(run, world, make, strategy, tmp_path / "a", None))
    for steps in (2, 5):
        saved = str(tmp_path / "a" / f"step={steps}.ckpt")
        assert together(run_spmd(run, world, make, strategy, tmp_path / f"b{steps}", saved)) == whole[steps:]
