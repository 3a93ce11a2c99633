from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_3d.reference.position import Position, Progress
from lightning_3d.reference.sampler import GlobalOrderSampler


def sampler(samples: int, replicas: int, rank: int, *, batch: int = 8, **options: object) -> GlobalOrderSampler:
    options = {"training": True, "seed": 3, **options}
    return GlobalOrderSampler(
        TensorDataset(torch.zeros(samples)),
        batch_size=batch // replicas,
        num_replicas=replicas,
        rank=rank,
        **options,  # type: ignore[arg-type]
    )


def global_batches(samples: int, replicas: int, epoch: int = 0, **options: object) -> list[list[int]]:
    """Reads every rank's batches as a DataLoader would and joins those of one step in rank order."""
    steps = []
    for rank in range(replicas):
        one = sampler(samples, replicas, rank, **options)
        one.set_epoch(epoch)
        read = list(one)
        steps.append([read[i : i + one.batch_size] for i in range(0, len(read), one.batch_size)])
    return [list(itertools.chain(*batches)) for batches in itertools.zip_longest(*steps, fillvalue=[])]


@pytest.mark.parametrize("samples", [8, 64, 67, 71])
@pytest.mark.parametrize("training", [True, False])
def test_the_global_order_does_not_depend_on_the_data_degree(samples: int, training: bool) -> None:
    expected = global_batches(samples, 1, training=training)
    for replicas in (2, 4, 8):
        assert global_batches(samples, replicas, training=training) == expected


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_training_reads_everything_and_fills_the_last_batch_up(replicas: int) -> None:
    batches = global_batches(67, replicas)
    assert [len(batch) for batch in batches] == [8] * 9
    read = list(itertools.chain(*batches))
    assert sorted(read[:67]) == list(range(67))
    assert read[67:] == read[:5]
    assert [len(sampler(67, replicas, rank)) for rank in range(replicas)] == [72 // replicas] * replicas


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_evaluation_reads_everything_once_in_order(replicas: int) -> None:
    assert list(itertools.chain(*global_batches(67, replicas, training=False))) == list(range(67))
    ranks = [sampler(67, replicas, rank, training=False) for rank in range(replicas)]
    assert [len(one) for one in ranks] == [len(list(one)) for one in ranks]


def test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same() -> None:
    orders = {str(global_batches(64, 2, epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}
    assert len(orders) == 4
    assert global_batches(64, 2, 1) == global_batches(64, 2, 1) != global_batches(64, 2, 0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_epoch_may_begin_in_its_middle_on_any_data_degree(replicas: int) -> None:
    begin = Position(seed=3, epoch=5, samples=24)
    rest = global_batches(67, replicas, start=lambda _: begin)
    assert rest == global_batches(67, 1, epoch=5)[3:]
    assert len(sampler(67, replicas, 0, start=lambda _: begin)) == 72 // replicas


def test_progress_follows_the_trainer() -> None:
    progress = Progress(seed=7)
    assert progress.begin(0, 0, 100) == Position(seed=7, epoch=0, samples=0)
    assert progress.at(40) == Position(seed=7, epoch=0, samples=40)
    assert progress.begin(1, 0, 100) == Position(seed=7, epoch=1, samples=0)


def test_a_loaded_position_stands_until_reading_begins_and_brings_its_seed() -> None:
    progress, loaded = Progress(seed=7), Position(seed=9, epoch=2, samples=40)
    progress.load(loaded, 100)
    assert progress.at(0) == loaded
    assert progress.begin(2, 40, 100) == loaded
    assert progress.begin(3, 0, 100) == Position(seed=9, epoch=3)


def test_an_epoch_that_the_trainer_counted_as_done_too_early_shifts_all_later_ones() -> None:
    progress = Progress(seed=7)
    progress.load(Position(seed=7, epoch=2, samples=40), 100)
    assert progress.begin(3, 40, 100) == Position(seed=7, epoch=2, samples=40)
    assert progress.begin(4, 0, 100) == Position(seed=7, epoch=3)


def test_a_finished_or_abandoned_epoch_is_followed_by_the_next() -> None:
    progress = Progress(seed=7)
    progress.load(Position(seed=7, epoch=2, samples=40), 100)
    assert progress.begin(3, 0, 100) == Position(seed=7, epoch=3)


def test_positions_that_cannot_be_exact_are_refused() -> None:
    progress = Progress(seed=7)
    progress.load(Position(seed=7, epoch=2, samples=40), 100)
    with pytest.raises(ValueError, match="after 40 samples of an epoch, and the batches done are 80 samples"):
        progress.begin(2, 80, 100)
    with pytest.raises(ValueError, match="an epoch of 100 samples, and this text has 120"):
        progress.begin(2, 40, 120)
