"""A batch in micro-batches is the same batch: outputs, logged values and results equal Lightning's on whole batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.errors import BatchError
from tests.parity.measure import whole
from tests.spmd.fits import Fit, assert_equal_to_one_device, loader, normal, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import CLASSES, WIDTH, Plain, classified

pytestmark = pytest.mark.spmd

SIZES = (7, 7, 4, 1)


def batches() -> list[dict[str, Any]]:
    """Batches of several sizes and with all kinds of things in them."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "inputs": normal(index, size, WIDTH),
            "targets": torch.randint(0, CLASSES, (size,), generator=generator),
            "names": [f"{index}.{sample}" for sample in range(size)],
            "scale": torch.tensor(2.0, dtype=torch.float64),
            "shift": normal(9, 3, WIDTH).mean(dim=0),
        }
        for index, size in enumerate(SIZES)
    ]


class Everything(Plain):
    """Logs and returns in every way."""

    def __init__(self) -> None:
        super().__init__()
        stages = ("train", "val", "test")
        self.accuracy = nn.ModuleDict({f"of_{stage}": MulticlassAccuracy(CLASSES, average="micro") for stage in stages})
        self.mean = nn.ModuleDict({f"of_{stage}": MeanMetric() for stage in stages})
        self.total = nn.ModuleDict({f"of_{stage}": SumMetric() for stage in stages})
        self.last = nn.ModuleDict({f"of_{stage}": Running(SumMetric(), window=2) for stage in stages})
        self.names: list[str] = []

    def step(self, batch: Any, stage: str) -> dict[str, Any]:
        assert len(batch["names"]) == len(batch["inputs"])
        self.names += batch["names"]
        logits = self.model(batch["inputs"] * batch["scale"] + batch["shift"])
        each = F.cross_entropy(logits, batch["targets"], reduction="none")
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log(f"{stage}_mean", each.mean(), **both)
        self.log(f"{stage}_sum", each.sum(), reduce_fx="sum", **both)
        self.log_dict({f"{stage}_max": each.max()}, reduce_fx="max", **both)
        self.log(f"{stage}_min", each.min(), False, None, True, True, torch.min)
        self.log(f"{stage}_count", len(each), reduce_fx="sum", on_step=False, on_epoch=True)
        accuracy, mean = self.accuracy[f"of_{stage}"], self.mean[f"of_{stage}"]
        accuracy(logits, batch["targets"])
        self.log(f"{stage}_accuracy", accuracy, **both)
        mean.update(each)
        self.log(f"{stage}_metric", mean, on_step=False, on_epoch=True)
        total, last = self.total[f"of_{stage}"], self.last[f"of_{stage}"]
        total(each.sum())
        self.log(f"{stage}_total", total, **both)
        last.update(each.sum())
        self.log(f"{stage}_last", last, on_step=False, on_epoch=True)
        pair = (each.detach().mean(), logits.argmax(dim=1))
        return {"loss": each.mean(), "logits": logits, "pair": pair, "nothing": None, "names": batch["names"]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "test")["loss"]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["inputs"])


class Outputs(Callback):
    """What hooks are given, and what is logged by then."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.logged: list[dict[str, float]] = []
        self.names: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.see(trainer, outputs)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.see(trainer, outputs)

    def see(self, trainer: Trainer, outputs: dict[str, Any]) -> None:
        tensors = {"logits": outputs["logits"], "loss": outputs["loss"], "mean": outputs["pair"][0]}
        # A list of each micro-batch's list; one list where there is one micro-batch.
        parts = outputs["names"] if isinstance(outputs["names"][0], list) else [outputs["names"]]
        self.names.append(([name for part in parts for name in part], outputs["nothing"]))
        self.seen.append((whole(tensors), outputs["pair"][1]))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def everything(rank: int, world: int, strategies: list[Any]) -> list[Any]:
    found = []
    for strategy in strategies:
        outputs = Outputs()
        L.seed_everything(3, verbose=False)
        module = Everything()
        run = trainer(1, outputs, strategy=strategy, plugins=Mesh3DPrecision("64-true"), max_epochs=2)
        run.fit(module, loader(batches()), loader(batches()[:2]))
        results = run.test(module, loader(batches()), verbose=False)
        predictions = run.predict(module, loader(batches()))
        found.append((outputs.seen, [*outputs.logged, *results], predictions, outputs.names + module.names))
    return found


# The batch has tensors of other lengths on purpose; the first one says how large it is, as ever in Lightning.
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
def test_outputs_and_logged_values_equal_whole_batches() -> None:
    options = ({"micro_batch_size": 2}, {"num_microbatches": 3}, {"micro_batch_size": 2, "num_microbatches": 4})
    plain, *ours = run_spmd(everything, 1, ["auto", *options])[0]
    for seen, results, predictions, names in ours:
        torch.testing.assert_close(seen, plain[0], rtol=1e-10, atol=1e-13, check_dtype=False)
        for values, expected in zip(results, plain[1], strict=True):
            # States of metrics are fp32.
            assert values == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(predictions, plain[2], rtol=1e-10, atol=1e-13)
        assert names == plain[3]


class Sized(Plain):
    """Writes down the micro-batches that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        self.sizes.append(len(batch[0]))
        return super().loss(batch)


class Splits(Sized):
    """Cuts its batch itself: the odd samples, then the even ones."""

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        return [tuple(tensor[index::count] for tensor in batch) for index in range(count)]


def sizes(rank: int, world: int, make: Any, strategy: dict[str, Any], samples: int) -> list[int]:
    module = make()
    run = trainer(world, strategy=strategy, plugins=Mesh3DPrecision("64-true"), max_epochs=1)
    run.fit(module, loader(classified(1, samples)))
    return list(module.sizes)


def test_slices_are_as_even_as_possible() -> None:
    for options, samples, expected in (
        ({"micro_batch_size": 2}, 7, [2, 2, 2, 1]),
        ({"num_microbatches": 4}, 7, [2, 2, 2, 1]),
        ({"num_microbatches": 4}, 3, [1, 1, 1]),
        ({"micro_batch_size": 9}, 7, [7]),
        ({"micro_batch_size": 3, "num_microbatches": 3}, 7, [3, 2, 2]),
    ):
        assert run_spmd(sizes, 1, Sized, options, samples)[0] == expected
    assert run_spmd(sizes, 1, Splits, {"num_microbatches": 3}, 7)[0] == [3, 2, 2]


def test_a_module_may_cut_its_batches_itself() -> None:
    cases = [
        Fit(make=Splits, batches=classified(3, 8), strategy={"zero_stage": stage, "num_microbatches": 2})
        for stage in (1, 3)
    ]
    assert_equal_to_one_device(1, *cases)


def test_inconsistent_micro_batches_are_an_error() -> None:
    run_spmd(refused, 1)


def refused(rank: int, world: int) -> None:
    with pytest.raises(BatchError, match=r"8 samples makes 4 micro-batches(?s:.*)num_microbatches=4"):
        sizes(rank, world, Sized, {"micro_batch_size": 2, "num_microbatches": 2}, 8)


def trained_on_uneven_batches(rank: int, world: int, strategy: dict[str, Any]) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = Plain()
    uneven = [share(batch, rank, world) for batch in (*classified(2, 14), *classified(1, 6))]
    run = trainer(
        world,
        strategy=Mesh3DStrategy(**strategy),
        plugins=Mesh3DPrecision("64-true"),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    run.fit(module, loader(uneven))
    return whole(dict(module.named_parameters()))


def test_uneven_micro_batches_equal_one_mean_over_the_batch() -> None:
    expected = run_spmd(trained_on_uneven_batches, 1, {})[0]
    for stage in (0, 2):
        found = run_spmd(trained_on_uneven_batches, 2, {"zero_stage": stage, "micro_batch_size": 2})[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
