from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from lightning_3d.batches.peek import BegunLoader, first_batch


class Numbers(Dataset[Tensor]):
    """Counts what is read of it; items are noisy from all three generators."""

    def __init__(self, length: int = 10, noise: bool = False) -> None:
        self.length, self.noise, self.reads = length, noise, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        assert get_worker_info() is None
        self.reads += 1
        noise = torch.rand(()) + np.random.rand() + random.random() if self.noise else 0.0
        return torch.tensor(float(index)) + noise


class Stream(IterableDataset[int]):
    """Counts how often it was begun."""

    def __init__(self, length: int) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(100 * self.begun, 100 * self.begun + self.length))


def values(loader: Any) -> list[list[float]]:
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in loader]


def seeded() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def seeded_sampler() -> RandomSampler:
    return RandomSampler(range(10), generator=generator())


class CountingSampler(Sampler[int]):
    """Another order at each pass, from generators and counters of its own."""

    def __init__(self) -> None:
        self.passes = 0
        self.seen: list[int] = []
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.old, self.torch = np.random.RandomState(1), generator()

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        draws = self.python.random() + self.numpy.random() + self.old.rand() + torch.rand((), generator=self.torch)
        self.seen.append(int(100 * draws))
        order = list(range(10))
        random.Random(self.seen[-1] + self.passes).shuffle(order)
        return iter(order)


class OwnIteration(DataLoader[Tensor]):
    """Keeps one iterator for ever."""

    def __iter__(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = super().__iter__()
        return self.kept


@pytest.mark.parametrize(
    "build",
    [
        lambda: DataLoader(Numbers(), batch_size=3),
        lambda: DataLoader(Numbers(noise=True), batch_size=3, shuffle=True),
        lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=generator()),
        lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(seeded_sampler(), 3, True)),
        lambda: DataLoader(Numbers(), batch_size=None, sampler=seeded_sampler()),
        lambda: DataLoader(Numbers(), batch_size=4, collate_fn=lambda items: torch.stack(items).flip(0)),
        lambda: DataLoader(Numbers(), batch_size=3, sampler=CountingSampler()),
        lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(CountingSampler(), 3, False)),
        lambda: DataLoader(Numbers(), batch_sampler=[[3, 4], [5]]),
        lambda: DataLoader(
            Numbers(), batch_size=3, sampler=DistributedSamplerWrapper(CountingSampler(), num_replicas=2, rank=1)
        ),
    ],
)  # fmt: skip
def test_a_loader_over_indices_is_read_and_left_as_it_was(build: Any) -> None:
    seeded()
    expected = build()
    passes = [values(expected), values(expected)]
    seeded()
    loader = build()
    batch, same = first_batch(loader)
    assert same is loader
    assert batch.reshape(-1).tolist() == passes[0][0]
    assert [values(loader), values(loader)] == passes


def test_generators_are_what_they_were() -> None:
    seeded()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    first_batch(DataLoader(Numbers(noise=True), batch_size=3, shuffle=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]
    assert random.getstate() == states[2]


def test_workers_are_not_started_and_only_one_batch_is_read() -> None:
    data = Numbers()
    loader = DataLoader(data, batch_size=3, num_workers=2, timeout=5, persistent_workers=True, pin_memory=True)
    batch, _ = first_batch(loader)
    assert batch.tolist() == [0, 1, 2]
    assert data.reads == 3
    assert loader.num_workers == 2
    assert loader._iterator is None


class OpenedByWorkers(Dataset[int]):
    opened = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if not self.opened:
            raise ValueError("closed")
        return index


def open_dataset(worker: int) -> None:
    get_worker_info().dataset.opened = True  # type: ignore[union-attr]


def test_a_dataset_that_workers_open_is_read_by_them() -> None:
    loader = DataLoader(OpenedByWorkers(), batch_size=2, num_workers=1, worker_init_fn=open_dataset)
    batch, use = first_batch(loader)
    assert batch.tolist() == [0, 1]
    assert values(use) == values(use) == [[0, 1], [2, 3]]


def test_a_dataset_that_fails_says_so() -> None:
    with pytest.raises(ValueError, match="closed"):
        first_batch(DataLoader(OpenedByWorkers(), batch_size=2))


def test_a_stream_is_begun_once_and_gone_on_with() -> None:
    data = Stream(5)
    batch, use = first_batch(DataLoader(data, batch_size=2))
    assert batch.tolist() == [100, 101]
    assert values(use) == [[100, 101], [102, 103], [104]]
    assert data.begun == 1
    assert values(use) == [[200, 201], [202, 203], [204]]


class Noise(IterableDataset[float]):
    """Draws from every generator."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(3):
            yield random.random() + float(np.random.rand()) + float(torch.rand(()))


@pytest.mark.parametrize("looks", [1, 2])
def test_what_was_begun_draws_on_as_if_nobody_had_looked(looks: int) -> None:
    seeds = (random.seed, np.random.seed, torch.manual_seed)
    for seed in seeds:
        seed(4)
    expected = [float(batch) for batch in DataLoader(Noise(), batch_size=None)]
    for seed in seeds:
        seed(4)
    loader: Any = DataLoader(Noise(), batch_size=None)
    for _ in range(looks):
        _, loader = first_batch(loader)
    assert [float(batch) for batch in loader] == expected


def test_generators_that_were_used_since_are_left_alone() -> None:
    torch.manual_seed(4)
    _, loader = first_batch(DataLoader(Noise(), batch_size=None))
    torch.manual_seed(5)
    assert len(list(loader)) == 3
    after = torch.rand(())
    torch.manual_seed(5)
    torch.rand(2)
    assert torch.equal(after, torch.rand(()))


def test_looking_twice_changes_nothing() -> None:
    data = Stream(4)
    _, use = first_batch(DataLoader(data, batch_size=2))
    batch, again = first_batch(use)
    assert again is use
    assert batch.tolist() == [100, 101]
    assert values(again) == [[100, 101], [102, 103]]
    assert first_batch(again)[0].tolist() == [200, 201]
    assert values(again) == [[200, 201], [202, 203]]


def test_an_iteration_that_stops_early_is_not_resumed() -> None:
    _, use = first_batch(DataLoader(Stream(4), batch_size=2))
    assert next(iter(use)).tolist() == [100, 101]
    assert values(use) == [[200, 201], [202, 203]]


@pytest.mark.parametrize("build", [lambda: iter([1, 2, 3]), lambda: (i for i in (1, 2, 3)), lambda: [1, 2, 3]])
def test_plain_iterables(build: Any) -> None:
    batch, use = first_batch(build())
    assert batch == 1
    assert list(use) == [1, 2, 3]
    assert list(use) == ([1, 2, 3] if isinstance(build(), list) else [])


def test_samplers_and_loaders_that_cannot_be_put_back_are_gone_on_with() -> None:
    _, use = first_batch(DataLoader(Numbers(), batch_sampler=iter([[1, 2], [3]])))  # type: ignore[arg-type]
    assert values(use) == [[1, 2], [3]]
    _, use = first_batch(OwnIteration(Numbers(5), batch_size=2))
    assert values(use) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("loader", [DataLoader(Numbers(0)), DataLoader(Stream(0)), [], iter(())])
def test_nothing_to_look_at(loader: Any) -> None:
    assert first_batch(loader) == (None, loader)


class Stateful:
    """Can be moved; knows its length."""

    name = "mine"

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 4))

    def __len__(self) -> int:
        return 4 - self.start

    def state_dict(self) -> int:
        return self.start

    def load_state_dict(self, state: int) -> None:
        self.start = state


def test_attributes_are_the_loaders() -> None:
    loader = Stateful()
    _, use = first_batch(loader)
    assert isinstance(use, BegunLoader)
    assert (use.name, len(use), use.state_dict()) == ("mine", 4, 0)
    use.name = "other"
    assert loader.name == "other"
    assert copy.copy(use).name == "other"
    assert not hasattr(use, "absent")
    with pytest.raises(TypeError, match="len"):
        len(first_batch(iter([1]))[1])


def test_a_loader_that_is_moved_does_not_go_on_from_where_it_was() -> None:
    _, use = first_batch(Stateful())
    use.load_state_dict(2)
    assert list(use) == [2, 3]


# ---- several loaders ----


def several(mode: Any, limits: list[int] | None = None) -> CombinedLoader:
    loaders = {"a": DataLoader(Numbers(4), batch_size=2), "b": [DataLoader(Stream(3), batch_size=2), Stateful()]}
    combined = CombinedLoader(loaders, mode)
    combined.limits = limits
    return combined


def plain(batches: Any) -> list[Any]:
    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [of(item) for item in value]
        return value.tolist() if isinstance(value, Tensor) else value

    return [of(batch) for batch in batches]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_combined_loaders_give_what_their_mode_gives(mode: str) -> None:
    expected = plain(several(mode))
    batch, use = first_batch(several(mode))
    assert isinstance(use, CombinedLoader)
    assert plain([batch]) == expected[:1]
    assert plain(use) == expected


def test_the_users_combination_is_left_alone_and_loaders_over_indices_stay() -> None:
    combined = several("min_size")
    loaders = list(combined.flattened)
    _, use = first_batch(combined)
    assert combined.flattened == loaders
    assert use.flattened[0] is loaders[0]
    assert use.iterables["b"][0] is use.flattened[1]


def test_in_sequence_only_the_loader_that_comes_first_is_touched() -> None:
    combined = several("sequential", limits=[0, 5, 5])
    batch, use = first_batch(combined)
    assert plain([batch]) == [[[100, 101], 0, 1]]
    assert combined.flattened[0].dataset.reads == 0
    assert use.flattened[2] is combined.flattened[2]


def test_combinations_without_a_batch() -> None:
    empty = DataLoader(Numbers(0))
    for mode in ("min_size", "max_size_cycle", "sequential"):
        assert first_batch(CombinedLoader([empty], mode))[0] is None  # type: ignore[arg-type]
    assert first_batch(CombinedLoader([[]], "sequential"))[0] is None
    batch, _ = first_batch(CombinedLoader([empty, DataLoader(Numbers(2))], "sequential"))
    assert plain([batch]) == [[[0.0], 0, 1]]
    batch, _ = first_batch(CombinedLoader([empty, DataLoader(Numbers(2))], "max_size"))
    assert plain([batch]) == [[[None, [0.0]], 0, 0]]


def test_sequential_sampler_without_batches() -> None:
    loader = DataLoader(Numbers(3), batch_size=None, sampler=SequentialSampler(range(3)))
    assert first_batch(loader)[0].item() == 0
