"""Data on the tensor axis: the first batch is not lost, a group of tensor ranks sees the same, data ranks do not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_3d.errors import BatchError, ModuleError
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, Scenario, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


class Sees(L.LightningModule):
    """Writes down the batches that it sees."""

    def __init__(self, data: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.GELU(), nn.Linear(8, 1))
        self.data = data
        self.calls: list[str] = []
        self.batches: list[Any] = []
        self.others: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = torch.utils._pytree.tree_leaves(batch)
        self.batches.append([value.tolist() for value in values])
        return self.net(values[0].view(-1, 1).to(self.dtype)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Augmented(Numbers):
    """Adds noise of every generator."""

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random(), float(np.random.rand()), float(torch.rand(()))
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """Begins anew with each iteration, and shares its samples out to workers."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        own, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(own, 12, step):
            yield Augmented()[index]


class Once(IterableDataset[Tensor]):
    """Goes on where it was left, as a file does."""

    def __init__(self) -> None:
        self.samples = iter([torch.tensor(float(index)) for index in range(24)])

    def __iter__(self) -> Iterator[Tensor]:
        return self.samples


class Validates(Sees):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.others.append(batch.tolist())
        self.net(batch.view(-1, 1).to(self.dtype))


# ---- the first batch ----


def seen(ranks: Ranks, *data: Any, **options: Any) -> Any:
    module = Validates() if len(data) > 1 else Sees()
    ranks.trainer(**options).fit(module, *data)
    return module.batches, module.others


def streams(ranks: Ranks) -> Any:
    return [
        seen(ranks, DataLoader(Stream(), batch_size=4), max_epochs=2),
        seen(ranks, DataLoader(Once(), batch_size=4), limit_train_batches=2, max_epochs=2),
        seen(ranks, (batch for batch in torch.arange(12.0).split(4))),
        seen(ranks, iter(torch.arange(12.0).split(4))),
        seen(ranks, torch.arange(12.0).split(4), max_epochs=2),
    ]


def shuffled(ranks: Ranks) -> Any:
    options = {"batch_size": 4, "shuffle": True}
    several = {"a": DataLoader(Numbers(), **options), "b": [DataLoader(Augmented(8), **options)]}
    return [
        seen(ranks, DataLoader(Augmented(), **options), loader(torch.arange(4.0).split(2)), max_epochs=2),
        seen(ranks, several),
        seen(ranks, DataLoader(Numbers(), **options, generator=torch.Generator().manual_seed(4)), max_epochs=2),
    ]


def workers(ranks: Ranks) -> Any:
    L.seed_everything(5, workers=True, verbose=False)
    return [
        seen(ranks, DataLoader(Augmented(8), batch_size=4, shuffle=True, num_workers=2), max_epochs=2),
        seen(ranks, DataLoader(Stream(), batch_size=4, num_workers=2), max_epochs=2),
    ]


class Hooked(Validates):
    """Its loaders go on with one stream, and are asked for anew after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Once()

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return DataLoader(self.stream, batch_size=4)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return DataLoader(torch.utils.data.random_split(Numbers(), [4, 8])[0], batch_size=2)


class HookedData(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.stream = Once()

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return DataLoader(self.stream, batch_size=4)


def hooks(ranks: Ranks) -> Any:
    module, other, data = Hooked(), Sees(), HookedData()
    options: dict[str, Any] = {"limit_train_batches": 2, "max_epochs": 2}
    ranks.trainer(**options, reload_dataloaders_every_n_epochs=1).fit(module)
    ranks.trainer(**options).fit(other, data)
    assert "train_dataloader" not in vars(module)
    assert "train_dataloader" not in vars(data)
    return sorted(module.calls), module.batches, module.others, data.calls, other.batches


@pytest.mark.parametrize("scenario", [streams, shuffled, workers, hooks], ids=lambda each: each.__name__)
def test_batches_of_one_device(scenario: Scenario) -> None:
    seen_alike(scenario)


# ---- the same inside a group, and different between data ranks ----


class DrawsAlone(Callback):
    """Draws numbers on the first rank, as a logger may."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 0:
            torch.rand(1), np.random.rand(), random.random()


def on_a_mesh(rank: int, world: int) -> list[Any]:
    found = []
    for count in (0, 1):
        for make in (Augmented, Stream):
            # As processes are that nobody has seeded.
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(rank)
            data: Any = DataLoader(make(), batch_size=2, num_workers=count)
            module = Sees()
            strategy = {"tensor_parallel_size": 2, "check_replicas": True}
            Ranks(world=world, strategy=strategy).trainer(DrawsAlone(), max_epochs=2).fit(module, data)
            found.append(module.batches)
    return found


def samples(batches: Iterable[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for leaf in batch for row in leaf]


def test_groups_see_the_same_and_data_ranks_do_not() -> None:
    first, second, third, fourth = run_spmd(on_a_mesh, 4, timeout=120)
    assert first == second
    assert third == fourth
    for index in (0, 2):
        # 12 samples in order over 2 data ranks: of every 4 the first 2 and the last 2, in each of 2 epochs.
        assert samples(first[index]) == [0, 1, 4, 5, 8, 9] * 2
        assert samples(third[index]) == [2, 3, 6, 7, 10, 11] * 2
        # The noise is another one on the other data rank, and in the other epoch.
        noises = [tuple(row[1:]) for each in (first, third) for batch in each[index] for leaf in batch for row in leaf]
        assert len(set(noises)) == len(noises) == 24


# ---- what is checked ----


class BySeed(Numbers):
    """Draws from a generator that every process seeds on its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(rank)

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand((), generator=self.generator)


class Drifts(Callback):
    """Changes a replicated parameter on one rank."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1:
            pl_module.net[2].bias.data.to_local().add_(1e-12)  # type: ignore[index, union-attr, operator]


def checked(rank: int, world: int) -> list[str]:
    ranks = Ranks(world=world, strategy={"check_replicas": True})
    texts = []
    with pytest.raises(BatchError) as batch:
        ranks.trainer().fit(Sees(), DataLoader(BySeed(rank), batch_size=4))
    texts.append(str(batch.value))
    return texts


def drifted(rank: int, world: int) -> str:
    ranks = Ranks(world=world, strategy={"check_replicas": True})
    with pytest.raises(ModuleError) as caught:
        ranks.trainer(Drifts()).fit(Sees(), DataLoader(Numbers(), batch_size=4))
    return str(caught.value)


def test_what_differs_is_found() -> None:
    for texts in run_spmd(checked, 2, timeout=60):
        assert all("batch 0 differs on model-parallel ranks 1 from rank 0" in text for text in texts), texts
    for text in run_spmd(drifted, 2, timeout=60):
        assert "'net.2.bias' differs on tensor-parallel ranks 1 from rank 0" in text


# ---- replicas stay equal ----


def twenty_steps(rank: int, world: int) -> list[dict[str, bytes]]:
    found = []
    for sequence in (False, True):
        torch.manual_seed(0)
        module = NextToken(PackedGPT())
        strategy = {"check_replicas": True, "sequence_parallel": sequence, "tensor_random": "derived"}
        run = Ranks(world=world, strategy=strategy).trainer(max_epochs=2, plugins=None, gradient_clip_val=0.5)
        run.fit(module, loader(tokens(10)))
        found.append(
            {
                name: each.to_local().numpy(force=True).tobytes()
                for name, each in module.named_parameters()
                if each.placements[-1].is_replicate()  # type: ignore[attr-defined]
            }
        )
    return found


def test_replicated_parameters_are_equal_to_the_bit_after_twenty_steps() -> None:
    first, second = run_spmd(twenty_steps, 2, timeout=90)
    assert first == second
    assert all(len(each) > 10 for each in first)
