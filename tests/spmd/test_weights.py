"""Losses with weights: one mean over micro-batches, data ranks and accumulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import BatchError
from tests.parity.measure import FP64, Record, compare, whole
from tests.spmd.fits import Fit, fit, loader, normal, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import CLASSES, WIDTH, Plain

pytestmark = pytest.mark.spmd

SAMPLES, LENGTH, BATCHES, ACCUMULATE = 8, 5, 5, 2
IGNORED = -100


class Tokens(Plain):
    """The mean over valid tokens, which are few in some samples and none in others."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        total = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self.valid(targets).clamp(min=1)

    def valid(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()


class Weighted(Tokens):
    """Asks for one mean over everything that makes an optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "loss_weight": self.valid(batch[1])}


class Sometimes(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if batch_idx == 0 else output["loss"]


class Weightless(Weighted):
    def valid(self, targets: Tensor) -> Tensor:
        return torch.zeros(())


def batches() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(BATCHES):
        targets = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
        lengths = torch.randint(0, LENGTH + 1, (SAMPLES, 1), generator=generator)
        targets[torch.arange(LENGTH) >= lengths] = IGNORED
        made.append((normal(index, SAMPLES, LENGTH, WIDTH), targets))
    return tuple(made)


def windows() -> tuple[Any, ...]:
    """The batches of each optimizer step in one, the last of them from a short window."""
    made = batches()
    starts = range(0, BATCHES, ACCUMULATE)
    return tuple(
        tuple(torch.cat(tensors) for tensors in zip(*made[start : start + ACCUMULATE], strict=True)) for start in starts
    )


def cases() -> list[Fit]:
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5}
    return [
        Fit(make=Weighted, batches=batches(), strategy={"zero_stage": stage} | micro, trainer=options)
        for stage in range(4)
        for micro in ({}, {"micro_batch_size": 2})
    ]


def steps_of(record: Record) -> Record:
    """What must be equal where the batches are not the same."""
    return replace(record, losses=[1.0], logged={})


def test_weighted_steps_are_one_mean_over_all_valid_tokens() -> None:
    once = Fit(make=Tokens, batches=windows(), trainer={"gradient_clip_val": 0.5})
    expected = run_spmd(fit, 1, once)[0][0]
    one_device = Fit(make=Weighted, batches=batches(), strategy={"num_microbatches": 3}, trainer=cases()[0].trainer)
    found = [*run_spmd(fit, 1, one_device)[0], *run_spmd(fit, 2, *cases())[0]]
    assert len(expected.gradients) == 3
    for case, record in zip([one_device, *cases()], found, strict=True):
        difference = compare(steps_of(record), steps_of(expected))
        assert difference.within(FP64), f"{case.strategy}: {difference}"


class Looks(Callback):
    """Whole gradients as both hooks see them."""

    def __init__(self) -> None:
        self.after_backward: list[dict[str, Tensor]] = []
        self.before_step: list[dict[str, Tensor]] = []
        self.outputs: list[dict[str, Tensor]] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after_backward.append(whole(dict(gradients(pl_module))))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.before_step.append(whole(dict(gradients(pl_module))))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(whole(outputs))


def gradients(module: LightningModule) -> list[tuple[str, Any]]:
    return [(name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None]


def looked(rank: int, world: int) -> list[list[list[dict[str, Tensor]]]]:
    found = []
    for stage in (0, 2):
        looks = Looks()
        options: Any = {"max_epochs": 1, "accumulate_grad_batches": BATCHES, "use_distributed_sampler": False}
        run = trainer(
            world,
            looks,
            strategy={"zero_stage": stage, "num_microbatches": 2},
            plugins=Mesh3DPrecision("64-true"),
            **options,
        )
        run.fit(Weighted(), loader(share(batch, rank, world) for batch in batches()))
        found.append([looks.after_backward, looks.before_step, looks.outputs])
    return found


def test_hooks_see_undivided_sums_then_the_mean() -> None:
    tokens = float(sum((targets != IGNORED).sum() for _, targets in batches()))
    for found in zip(*run_spmd(looked, 2), strict=True):
        for after_backward, before_step, _ in found:
            assert len(after_backward) == BATCHES
            assert len(before_step) == 1
            for name, mean in before_step[0].items():
                torch.testing.assert_close(after_backward[-1][name] * 2 / tokens, mean, rtol=1e-12, atol=1e-14)
        # The weight of a batch is the sum of its micro-batches'.
        weights = [[float(output["loss_weight"]) for output in outputs] for _, _, outputs in found]
        assert sum(map(sum, weights)) == tokens


@pytest.mark.parametrize(("make", "message"), [(Sometimes, "some did not"), (Weightless, "is 0 for every")])
def test_weights_that_make_no_mean_are_errors(make: Any, message: str) -> None:
    run_spmd(refused, 2, make, message)


def refused(rank: int, world: int, make: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        fit(rank, world, Fit(make=make, batches=batches(), trainer={"accumulate_grad_batches": 2}))
