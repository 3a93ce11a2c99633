"""Features of samplers: orders, and who reads which samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from tests.features.here import Here
from tests.features.modules import Module, Samples, weights
from tests.features.seeing import Sees, all_batches, dealt, fit
from tests.features.table import Feature, Seen

# ---- orders ----


def shuffled(here: Here) -> Seen:
    generator = torch.Generator().manual_seed(3)
    return {
        "by torch's generator": fit(here, here.loader(Samples(32), 8, shuffle=True), here.loader(Samples(12), 8)),
        "by its own": fit(here, here.loader(Samples(32), 8, shuffle=True, generator=generator)),
    }


def in_order(here: Here) -> Seen:
    first, second = random_split(Samples(40), [0.6, 0.4])
    return {
        "kept": fit(here, here.loader(Samples(24), 8), here.loader(Samples(24), 8)),
        "of parts": fit(here, here.loader(ConcatDataset([second, first]), 8), here.loader(first, 8)),
        "without Lightning's sampler": fit(
            here, here.loader(OfDataRank(here, Samples(24)), 8), use_distributed_sampler=False
        ),
    }


class OfDataRank(Dataset[Any]):
    """A part of some samples for each data rank, made by the user."""

    def __init__(self, here: Here, samples: Samples) -> None:
        part = len(samples) // here.mesh.data
        data_rank = here.rank * here.mesh.data // here.mesh.world
        # Rank 0 has the first half of each batch of 8.
        chosen = torch.arange(len(samples)).view(-1, here.mesh.data, 8 // here.mesh.data)[:, data_rank].reshape(-1)
        assert len(chosen) == part
        self.samples, self.chosen = samples, chosen.tolist()

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Any:
        return self.samples[self.chosen[index]]


def last_batches(here: Here) -> Seen:
    return {
        "short": fit(here, here.loader(Samples(28), 8, shuffle=True), here.loader(Samples(28), 8)),
        "dropped": fit(here, here.loader(Samples(29), 8, drop_last=True), here.loader(Samples(29), 8, drop_last=True)),
        "odd in evaluation": fit(here, here.loader(Samples(16), 8), here.loader(Samples(27), 8)),
    }


# ---- samplers ----


class Curriculum(Sampler[int]):
    """Easy samples first; more of them in every epoch."""

    def __init__(self, difficulty: Tensor) -> None:
        self.order = difficulty.argsort().tolist()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.order[: len(self)])

    def __len__(self) -> int:
        return min(8 + 8 * max(self.epoch, 1), len(self.order))


class Epochs(Sampler[int]):
    """An order that depends on the epoch, which Lightning tells it."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.count


def custom_samplers(here: Here) -> Seen:
    data = Samples(32)
    return {
        "curriculum": fit(here, here.loader(data, 8, sampler=Curriculum(data.inputs[:, 1])), max_epochs=3),
        "by epoch": fit(here, here.loader(data, 8, sampler=Epochs(32)), here.loader(data, 8, sampler=Epochs(20))),
    }


def random_samplers(here: Here) -> Seen:
    data, generator = Samples(32), torch.Generator().manual_seed(4)
    likely = (data.targets.double() + 0.5).tolist()
    return {
        "weighted": fit(here, here.loader(data, 8, sampler=WeightedRandomSampler(likely, 24))),
        "weighted, own generator": fit(
            here, here.loader(data, 8, sampler=WeightedRandomSampler(likely, 24, generator=generator))
        ),
        "subset": fit(here, here.loader(data, 8, sampler=SubsetRandomSampler(range(4, 28)))),
    }


def own_distributed_sampler(here: Here) -> Seen:
    data = Samples(24)
    rank = here.rank * here.mesh.data // here.mesh.world
    sampler = DistributedSampler[Any](data, num_replicas=here.mesh.data, rank=rank, shuffle=False)
    seen = fit(here, here.loader(data, 8, sampler=sampler))
    # It deals samples out one by one.
    return {**seen, "batches": [sorted(batch) for batch in seen["batches"]["train"]]}


# ---- batch samplers ----


class Buckets(Sampler[list[int]]):
    """Batches of samples that are alike in something, in another order in every epoch."""

    def __init__(self, alike: Tensor, /, size: int, seed: int = 0) -> None:
        in_order = alike.argsort().tolist()
        self._batches = [in_order[at : at + size] for at in range(0, len(in_order), size)]
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self._batches)
        self._random.shuffle(order)
        return iter(order)


class BySize(BatchSampler):
    """Lightning can make another one of this class, with another sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter(batches[1::2] + batches[::2])


def _fit_whole_batches(here: Here, train: Any, validate: Any = None, **options: Any) -> Seen:
    """Trains on a loader of whole batches, two for each step of the optimizer."""
    L.seed_everything(5, verbose=False)
    sees, module = Sees(), Module()
    trainer = here.trainer(
        sees,
        **({"max_epochs": 2, "num_sanity_val_steps": 0} | options),
        accumulate_grad_batches=2 // here.mesh.data,
    )
    trainer.fit(module, train, validate)
    return {
        "batches": all_batches(here, sees, dealt),
        "mean loss": float(trainer.callback_metrics["train_loss_epoch"]),
        "validation": float(trainer.callback_metrics.get("val_loss", 0.0)),
        "steps": trainer.global_step,
        "weights": weights(trainer),
    }


def batch_samplers(here: Here) -> Seen:
    data, other = Samples(32), Samples(20)
    return {
        "buckets": _fit_whole_batches(
            here,
            DataLoader(data, batch_sampler=Buckets(data.inputs[:, 1], 4)),
            DataLoader(other, batch_sampler=Buckets(other.inputs[:, 1], 4)),
        ),
        "of torch's kind": _fit_whole_batches(
            here, DataLoader(data, batch_sampler=BySize(Curriculum(data.inputs[:, 1]), 4, drop_last=False))
        ),
        "plain lists": _fit_whole_batches(
            here,
            DataLoader(data, batch_sampler=[[3, 1, 2], [9], [4, 5, 6, 7], [8, 0]]),
        ),
    }


class Batches(Dataset[Any]):
    """Each item is a whole batch."""

    def __init__(self, count: int) -> None:
        self.count, self.samples = count, Samples(4 * count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        chosen = slice(4 * index, 4 * index + 4)
        return self.samples.inputs[chosen], self.samples.targets[chosen]


class OfLists(Samples):
    """Takes a list of numbers at a time."""

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, list)
        return self.inputs[index], self.targets[index]


def without_batch_size(here: Here) -> Seen:
    whole = BatchSampler(range(32), 4, drop_last=True)
    return {
        "items are batches": _fit_whole_batches(
            here, DataLoader(Batches(8), batch_size=None, shuffle=True), DataLoader(Batches(5), batch_size=None)
        ),
        "items of lists": _fit_whole_batches(here, DataLoader(OfLists(32), sampler=whole, batch_size=None)),
    }


FEATURES: tuple[Feature, ...] = (
    Feature(name="DataLoader(shuffle=True)", program=shuffled),
    Feature(name="loaders in order", program=in_order),
    Feature(name="short last batches, drop_last", program=last_batches),
    Feature(name="samplers of one's own", program=custom_samplers),
    Feature(name="WeightedRandomSampler, SubsetRandomSampler", program=random_samplers),
    Feature(name="DistributedSampler of one's own", program=own_distributed_sampler),
    Feature(
        name="batch samplers of one's own",
        program=batch_samplers,
        note="Whole batches are dealt out, so a step of two data ranks is two batches.",
    ),
    Feature(name="DataLoader(batch_size=None)", program=without_batch_size),
)
