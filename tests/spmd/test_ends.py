"""Where data ends: no sample of an evaluation counts twice, none is left out, and nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.errors import BatchError
from tests.marks import more
from tests.spmd.fits import normal, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import CLASSES, WIDTH, Plain

pytestmark = [
    pytest.mark.spmd,
    # Lightning's advice for its own sampler, which repeats samples.
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"),
]


class Samples(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.inputs = normal(count, count, WIDTH)
        self.targets = torch.arange(count) % CLASSES

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], index


class Counts(Plain):
    """Counts every sample that it meets, in all the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.total = MulticlassAccuracy(CLASSES, average="micro"), SumMetric()
        self.average = MeanMetric()
        self.met: list[int] = []
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:2])

    def evaluate(self, batch: Any, loader: int) -> None:
        inputs, targets, indices = batch
        logits = self.model(inputs)
        each = F.cross_entropy(logits, targets, reduction="none")
        self.met += (100 * loader + indices).tolist()
        self.calls += 1
        where: dict[str, Any] = {"add_dataloader_idx": False, "sync_dist": True, "batch_size": len(targets)}
        self.log(f"mean_{loader}", each.mean(), **where)
        self.log(f"sum_{loader}", each.sum(), reduce_fx="sum", **where)
        self.log(f"max_{loader}", each.max(), reduce_fx="max", **where)
        self.log(f"min_{loader}", each.min(), reduce_fx="min", **where)
        self.log(f"step_{loader}", each.mean(), on_step=True, on_epoch=True, **where)
        self.accuracy.update(logits, targets)
        self.total.update(each.sum())
        self.average.update(each)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"accuracy": self.accuracy, "total": self.total, "average": self.average})

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[2]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[int] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert prediction.tolist() == batch[2].tolist()
        self.written += prediction.tolist()


def evaluated(rank: int, world: int, cases: list[tuple[tuple[int, ...], dict[str, Any]]]) -> list[Any]:
    """Validates, tests and predicts; a case is the lengths of its loaders and the strategy's options."""
    found = []
    for lengths, strategy in cases:
        torch.manual_seed(0)
        module, writer = Counts(), Writer()
        run = trainer(world, writer, strategy=strategy, plugins=Mesh3DPrecision("64-true"))
        loaders = [DataLoader(Samples(length), batch_size=4 // world) for length in lengths]
        values: dict[str, float] = {}
        for result in run.validate(module, loaders, verbose=False):
            values |= result
        tested: dict[str, float] = {}
        for result in run.test(module, loaders, verbose=False):
            tested |= result
        # Metrics keep nothing of what was only run to keep up with the others.
        assert tested == pytest.approx(values, rel=1e-9)
        met, calls = list(module.met), module.calls
        run.predict(module, loaders[0])
        found.append((values, met, calls, writer.written))
    return found


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((13,), {"zero_stage": 3}),
    ((9, 8, 3), {"zero_stage": 3}),
    ((11, 5), {"zero_stage": 0, "num_microbatches": 2}),
]


def test_evaluation_counts_every_sample_once() -> None:
    ranks = run_spmd(evaluated, 2, CASES)
    for index, one in enumerate(run_spmd(evaluated, 1, CASES)[0]):
        lengths = CASES[index][0]
        expected, _, _, predicted = one
        samples = [100 * loader + sample for loader, length in enumerate(lengths) for sample in range(length)]
        mine, theirs = (rank[index] for rank in ranks)
        assert sorted(mine[1] + theirs[1]) == sorted(2 * samples)
        assert sorted(mine[3] + theirs[3]) == sorted(predicted) == list(range(lengths[0]))
        for values in (mine[0], theirs[0]):
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                # Values of a step are means over other batches there.
                if "_step" not in name:
                    loose = 1e-6 if name in ("total", "average", "accuracy") else 1e-10
                    assert values[name] == pytest.approx(value, rel=loose), (name, lengths)


# ---- loaders without a length, and of other lengths on each rank ----


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[int]) -> None:
        self.samples, self.data = samples, Samples(64)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[sample] for sample in self.samples)


class Loader:
    """A loader of the user's own that knows its length."""

    def __init__(self, samples: list[int]) -> None:
        self.samples, self.data = samples, Samples(64)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.samples:
            inputs, target, index = self.data[sample]
            yield inputs[None], target[None], torch.tensor([index])


def parts(rank: int, counts: tuple[int, int]) -> list[int]:
    return list(range(counts[0])) if rank == 0 else list(range(counts[0], sum(counts)))


def streamed(rank: int, world: int, kind: str, stage: int, limit: int | None = None) -> dict[str, float]:
    counts = (3, 5)
    module = Counts()
    run = trainer(
        world,
        strategy={"zero_stage": stage},
        plugins=Mesh3DPrecision("64-true"),
        limit_val_batches=limit,
        limit_predict_batches=limit,
    )
    mine = parts(rank, counts) if world > 1 else list(range(sum(counts)))
    data: Any = DataLoader(Stream(mine), batch_size=1) if kind == "stream" else Loader(mine)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    mine = mine[:limit]
    values = run.validate(module, data, verbose=False)[0]
    assert sorted(module.met) == mine
    predicted = run.predict(module, data)
    assert [int(part) for part in predicted or ()] == mine
    return dict(values)


@pytest.mark.parametrize("kind", [more("stream"), "loader"])
def test_uneven_evaluation_counts_every_sample_once(kind: str) -> None:
    expected = run_spmd(streamed, 1, kind, 0)[0]
    run_spmd(streamed, 2, kind, 3, 4)
    for stage in (0, 3):
        for values in run_spmd(streamed, 2, kind, stage):
            for name, value in expected.items():
                if "step" not in name:
                    assert values[name] == pytest.approx(value, rel=1e-6), name


class Ends(Counts):
    """Logs in the hook at the end of each batch, after the step whose values have met."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("ended", batch[2].double().mean(), on_step=True, on_epoch=True, batch_size=len(batch[2]))


class Noted(Callback):
    """Notes what the hook of each batch has logged for a step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_batch_start(self, run: Trainer, *args: Any) -> None:
        if "ended_step" in run.logged_metrics:
            self.values.append(run.logged_metrics["ended_step"].item())


def ended(rank: int, world: int, stage: int) -> tuple[list[float], float]:
    mine = parts(rank, (3, 5)) if world > 1 else list(range(8))
    noted = Noted()
    run = trainer(world, noted, strategy={"zero_stage": stage}, plugins=Mesh3DPrecision("64-true"))
    values = run.validate(Ends(), Loader(mine), verbose=False)[0]
    return noted.values, values["ended_epoch"]


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_at_the_end_of_a_batch_keep_step_where_ranks_have_fewer(stage: int) -> None:
    (whole, mean), (shorter, same) = run_spmd(ended, 2, stage, timeout=40)
    assert mean == same == pytest.approx(sum(range(8)) / 8, rel=1e-12)
    # Means of both ranks while both have batches: sample 0 with 3, 1 with 4, 2 with 5.
    steps = [1.5, 2.5, 3.5]
    assert whole == pytest.approx(steps[:2], rel=1e-12)
    assert shorter == pytest.approx([*steps, 6.0], rel=1e-12)


def trained(rank: int, world: int, kind: str, uneven: str, stage: int) -> tuple[int, int]:
    module = Counts()
    samples = parts(rank, (4, 6))
    data: Any = DataLoader(Stream(samples), batch_size=1) if kind == "stream" else Loader(samples)
    run = trainer(
        world,
        strategy=Mesh3DStrategy(zero_stage=stage, uneven=uneven),
        plugins=Mesh3DPrecision("64-true"),
        max_epochs=2,
        accumulate_grad_batches=3,
    )
    run.fit(module, data)
    return run.global_step, run.fit_loop.epoch_loop.total_batch_idx + 1


@pytest.mark.parametrize("kind", ["stream", more("loader")])
def test_uneven_training_stops_at_the_shortest(kind: str) -> None:
    for stage in (0, 2):
        # 2 epochs of 4 batches, in windows of 3 and 1.
        assert run_spmd(trained, 2, kind, "stop", stage) == [(4, 8), (4, 8)]


def refused_uneven(rank: int, world: int, kind: str) -> None:
    with pytest.raises(BatchError, match='uneven="stop"'):
        trained(rank, world, kind, "error", 1)


@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_uneven_training_may_be_an_error(kind: str) -> None:
    run_spmd(refused_uneven, 2, kind)


def refused_small(rank: int, world: int, method: str) -> None:
    module = Counts()
    with pytest.raises(BatchError, match=rf"the (train|validate) dataset has 2 samples for {world} data ranks"):
        getattr(trainer(world, max_epochs=1), method)(module, DataLoader(Samples(2), batch_size=1))


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_fewer_samples_than_data_ranks_is_an_error(method: str) -> None:
    run_spmd(refused_small, 3, method)


def refused_empty(rank: int, world: int, kind: str) -> None:
    samples = [] if rank == 1 else [0, 1]
    data: Any = DataLoader(Stream(samples), batch_size=1) if kind == "stream" else Loader(samples)
    with pytest.raises(BatchError, match="1 of 2 data ranks have no batch at all"):
        trainer(world).validate(Counts().double(), data, verbose=False)


@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_a_rank_without_any_batch_is_an_error(kind: str) -> None:
    run_spmd(refused_empty, 2, kind)
