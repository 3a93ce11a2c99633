"""Optimizers, loss scales and metrics on a pipeline, and the trainings that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torchmetrics import SumMetric

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import ModuleError
from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader
from tests.spmd.pipeline_watched import TWO, Watched, samples, values, weights
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, seen_alike, tokens
from tests.spmd.toys import Plain

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]


# ---- what is refused ----


class NoLoss(Watched):
    """Has no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if batch_idx == 0 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("loss", float(outputs["loss"]))


class Lbfgs(Watched):
    """All parameters in one vector."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Manual(Watched):
    """Goes backward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


REFUSED: dict[str, tuple[type[Watched], str]] = {
    "no loss": (NoLoss, "training_step returned no loss for a micro-batch"),
    "one vector": (Lbfgs, "LBFGS takes all parameters as one vector"),
    "manual": (Manual, "Manual sets automatic_optimization=False"),
}


def refused(rank: int, world: int, names: list[str]) -> list[str]:
    found = []
    for name in names:
        trainer = Ranks(world=world, strategy=TWO).trainer(strategy={"num_microbatches": 2})
        # The other ranks learn of a failure by the end of the process group, which other cases need.
        trainer.strategy.on_exception = lambda exception: None  # type: ignore[method-assign]
        with pytest.raises(ModuleError) as caught:
            trainer.fit(REFUSED[name][0](), samples(8), samples(4))
        found.append(str(caught.value))
    return found


def test_errors_are_the_same_on_all_ranks() -> None:
    first, second = run_spmd(refused, 2, list(REFUSED))
    assert first == second
    for text, (_, expected) in zip(first, REFUSED.values(), strict=True):
        assert expected in text


# ---- optimizers of parameters that are elsewhere ----


class HeadOnly(Watched):
    """Trains what the last stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=0.1, foreach=True)


class Thaws(BaseFinetuning):
    """Lets the blocks train from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer, lr=1e-2)


def head_only(ranks: Ranks) -> Any:
    module = HeadOnly()
    trainer = ranks.trainer(max_epochs=2, strategy={"num_microbatches": 2}, gradient_clip_val=0.1)
    trainer.fit(module, samples(8), samples(4))
    return values(trainer), weights(trainer)


def thawed(ranks: Ranks) -> Any:
    module, thaws = HeadOnly(), Thaws()
    trainer = ranks.trainer(thaws, max_epochs=3, strategy={"num_microbatches": 2})
    trainer.fit(module, samples(8), samples(4))
    names = [group["params"] for group in thaws._internal_optimizer_metadata[0]]
    return values(trainer), weights(trainer), names


def test_an_optimizer_may_have_nothing_on_a_rank() -> None:
    seen_alike(head_only, **TWO)


def test_layers_that_are_thawed_train() -> None:
    *_, names = seen_alike(thawed, **TWO)
    assert [len(each) for each in names] == [2, 16]


# ---- one loss scale ----


def scaled(ranks: Ranks) -> Any:
    torch.set_default_dtype(torch.float32)
    module = Plain()
    trainer = ranks.trainer(strategy={"num_microbatches": 2}, plugins=Mesh3DPrecision("16-mixed"), max_epochs=2)
    batches = [(inputs.float(), targets) for inputs, targets in samples(8)]
    # A loss that overflows on the last stage makes every rank skip its step.
    batches[1][0].mul_(1e30)
    trainer.fit(module, loader(batches))
    precision: Any = trainer.precision_plugin
    return float(precision.scaler.get_scale()), trainer.global_step


def test_all_ranks_have_one_loss_scale() -> None:
    scale, _ = seen_alike(scaled, **TWO)
    assert scale == 2.0**14


# ---- metrics of ranks that see the same samples ----


class Sums(NextToken):
    """Counts samples."""

    def __init__(self) -> None:
        super().__init__(PackedGPT())
        self.count = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.update(torch.tensor(float(len(batch[0]))))
        self.log("count", self.count, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def counted(ranks: Ranks) -> Any:
    trainer = ranks.trainer(strategy={"num_microbatches": 2})
    trainer.fit(Sums(), loader(tokens(2)))
    return values(trainer)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_sample_counts_once(axis: str) -> None:
    degrees = TWO if axis == "pipeline" else {}
    assert seen_alike(counted, **degrees)["count"] == 8.0
