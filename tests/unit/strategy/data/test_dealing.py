"""Dealing loaders out to data ranks: together they read what one device reads, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_3d.errors import BatchError
from lightning_3d.strategy.data.dealing import LoaderDealer


def dealt(loader: Any, ranks: int, rank: int, *, fill: bool) -> Any:
    dealer = LoaderDealer(ranks, rank, nullcontext)
    trainer: Any = SimpleNamespace(_accelerator_connector=SimpleNamespace(use_distributed_sampler=True))
    dealer.take_over(trainer)
    assert trainer._accelerator_connector.use_distributed_sampler is False
    dealer.take_over(trainer)
    return dealer.deal(loader, "training", fill=fill)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("samples", range(4, 20))
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_read_together_what_one_device_reads(samples: int, ranks: int, drop_last: bool, shuffle: bool) -> None:
    def reads(batch_size: int, **place: int) -> tuple[list[list[int]], int]:
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(
            range(samples), batch_size=batch_size, drop_last=drop_last, shuffle=shuffle, generator=generator
        )
        loader = dealt(loader, fill=False, **place) if place else loader
        return batches(loader), len(loader)

    alone, _ = reads(2 * ranks)
    found = [reads(2, ranks=ranks, rank=rank) for rank in range(ranks)]
    for hand, length in found:
        assert len(hand) == length
    for at, batch in enumerate(alone):
        assert [index for hand, _ in found for index in (hand[at] if at < len(hand) else [])] == batch


@pytest.mark.parametrize("samples", range(4, 20))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_training_all_ranks_read_equally_many(samples: int, ranks: int) -> None:
    hands = [batches(dealt(DataLoader(range(samples), batch_size=2), ranks, rank, fill=True)) for rank in range(ranks)]
    assert len({tuple(map(len, hand)) for hand in hands}) == 1
    read = sorted(index for hand in hands for batch in hand for index in batch)
    again = -samples % ranks
    assert read == sorted([*range(samples), *range(again)])


class Buckets:
    """A batch sampler that nobody could make again from its attributes."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(("fill", "second"), [(True, [[3], [0, 1, 2]]), (False, [[3]])])
def test_batches_of_a_batch_sampler_stay_whole(fill: bool, second: list[list[int]]) -> None:
    loader: Any = DataLoader(range(10), batch_sampler=Buckets([[0, 1, 2], [3], [4, 5]]))  # type: ignore[arg-type]
    for rank, expected in enumerate([[[0, 1, 2], [4, 5]], second]):
        mine = dealt(loader, 2, rank, fill=fill)
        assert (batches(mine), len(mine)) == (expected, len(expected))


def test_ready_batches_are_dealt_in_turn() -> None:
    loader: Any = DataLoader([torch.tensor([index]) for index in range(5)], batch_size=None)
    assert [batches(dealt(loader, 2, rank, fill=False)) for rank in (0, 1)] == [[[0], [2], [4]], [[1], [3]]]


def test_a_subclass_of_the_users_stays_what_it_is() -> None:
    class Own(DataLoader[Any]):
        def __init__(self, wanted: int) -> None:
            super().__init__(range(wanted), batch_size=2)  # type: ignore[arg-type]
            self.more = "kept"

    mine = dealt(Own(8), 2, 1, fill=True)
    assert (type(mine), mine.more, batches(mine)) == (Own, "kept", [[2, 3], [6, 7]])


def test_epochs_reach_the_users_sampler() -> None:
    class Ordered(SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data: Any = list(range(4))
    sampler = Ordered(data)
    mine = dealt(DataLoader(data, sampler=sampler), 2, 0, fill=True)
    mine.sampler.set_epoch(3)
    assert sampler.epoch == 3
    dealt(DataLoader(data, sampler=RandomSampler(data)), 2, 0, fill=True).sampler.set_epoch(3)


def test_endless_samplers_are_read_as_far_as_needed() -> None:
    class Endless(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from range(4)

    mine = iter(dealt(DataLoader(range(4), batch_size=1, sampler=Endless()), 2, 1, fill=True))  # type: ignore[arg-type]
    assert [int(next(mine)) for _ in range(3)] == [1, 3, 1]


def test_streams_and_loaders_that_are_none_stay() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    for loader in (DataLoader(Stream()), [1, 2], BatchSampler(SequentialSampler([1]), 1, False)):
        assert dealt(loader, 2, 0, fill=True) is loader


def test_fewer_samples_than_ranks_is_an_error() -> None:
    with pytest.raises(BatchError, match="the training dataset has 3 samples for 4 data ranks"):
        dealt(DataLoader(range(3)), 4, 0, fill=True)  # type: ignore[arg-type]
