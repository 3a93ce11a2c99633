"""Optimizers, clipping, units and loss scales on the data axis, and optimizers that the module steps itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import ModuleError
from tests.parity.measure import FP64, Difference, compare, whole
from tests.spmd.fits import Fit, assert_equal_to_one_device, fit, loader, normal, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import ClipsItself, Gan, Plain, classified

pytestmark = pytest.mark.spmd

BATCHES = classified(5, 8)
WINDOWS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


class Foreach(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, foreach=True)


class Fused(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Momentum(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Scheduled(Plain):
    """Two groups and a schedule that must know how many steps there will be."""

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}])
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_optimizers_and_clipping_equal_one_device() -> None:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    cases = [
        Fit(make=make, batches=BATCHES, strategy={"zero_stage": stage}, trainer=WINDOWS)
        for make in (Foreach, Fused, Momentum, Scheduled)
        for stage in (0, 1, 3)
    ]
    cases += [
        Fit(make=Plain, batches=BATCHES, strategy={"zero_stage": stage}, trainer=WINDOWS | by_value)
        for stage in range(4)
    ]
    assert_equal_to_one_device(2, *cases)


def test_offload_and_units_of_several_blocks_equal_one_device() -> None:
    cases = [
        Fit(make=Plain, batches=BATCHES, strategy={"zero_stage": stage, **options}, trainer=WINDOWS)
        for stage in (1, 2, 3)
        for options in ({"cpu_offload": True}, {"unit_blocks": 3}, {"unit_blocks": 9, "num_microbatches": 2})
    ]
    assert_equal_to_one_device(2, *cases)


def test_hybrid_sharding_equals_one_device() -> None:
    cases = [
        Fit(
            make=make,
            batches=BATCHES,
            strategy={"zero_stage": stage, "data_replicate_size": 2, "num_microbatches": 2},
            trainer=WINDOWS,
        )
        for make, stage in ((Plain, 1), (Fused, 2), (Plain, 3))
    ]
    assert_equal_to_one_device(4, *cases)


# ---- one loss scale ----


class Overflow(Callback):
    """Makes one gradient of one rank infinite in the second step, and watches scale and weights."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.scales: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 1:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[0] = float("inf")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        precision: Any = trainer.precision_plugin
        self.scales.append(precision.scaler.get_scale())
        self.weights.append(whole(dict(pl_module.named_parameters())))


def overflown(rank: int, world: int) -> list[tuple[list[float], list[dict[str, Tensor]]]]:
    found = []
    for make, stage in ((Plain, 0), (Plain, 1), (Fused, 2), (Foreach, 3)):
        watch = Overflow(rank=1)
        scaled = Mesh3DPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=1024.0))
        run = trainer(
            world,
            watch,
            strategy={"zero_stage": stage},
            plugins=scaled,
            max_epochs=1,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
        )
        torch.manual_seed(0)
        single = [(inputs.float(), targets) for inputs, targets in BATCHES[:4]]
        run.fit(make(), loader(share(batch, rank, world) for batch in single))
        found.append((watch.scales, watch.weights))
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    first, second = run_spmd(overflown, 2)
    for (scales, mine), (their_scales, theirs) in zip(first, second, strict=True):
        assert scales == their_scales == [1024.0, 512.0, 512.0, 512.0]
        for index, (weights, same) in enumerate(zip(mine, theirs, strict=True)):
            assert all(torch.equal(weights[name], same[name]) for name in weights)
            moved = index == 0 or any(not torch.equal(weights[n], mine[index - 1][n]) for n in weights)
            assert moved == (index != 1)


def test_scaled_steps_equal_one_device() -> None:
    single = tuple((inputs.float(), targets) for inputs, targets in BATCHES)
    cases = [
        Fit(make=Fused, batches=single, strategy={"zero_stage": stage}, trainer=WINDOWS, precision=scaled)
        for stage in (0, 2, 3)
    ]
    # fp16 rounds what ranks add up in another order.
    assert_equal_to_one_device(2, *cases, bounds=Difference(loss=2e-3, norm=2e-3, gradient=2e-2, parameter=0.1))


def scaled() -> Mesh3DPrecision:
    return Mesh3DPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=1024.0))


# ---- manual optimization ----


def gan_of_windows() -> LightningModule:
    return Gan(every=2)


def test_networks_that_train_against_each_other_equal_one_device() -> None:
    cases = [
        Fit(make=make, batches=BATCHES, strategy={"zero_stage": stage})
        for make in (Gan, gan_of_windows)
        for stage in range(4)
    ]
    assert_equal_whole_batches(cases)


def assert_equal_whole_batches(cases: list[Fit]) -> None:
    """One device runs whole batches here: a step that goes backward itself has no micro-batches."""
    makes = list(dict.fromkeys(case.make for case in cases))
    references = run_spmd(fit, 1, *(Fit(make=make, batches=BATCHES) for make in makes))[0]
    for case, record in zip(cases, run_spmd(fit, 2, *cases)[0], strict=True):
        difference = compare(record, references[makes.index(case.make)])
        assert difference.within(FP64), f"{case.make.__name__}, {case.strategy}: {difference}"


def test_clipping_inside_the_step_equals_one_device() -> None:
    cases = [Fit(make=ClipsItself, batches=BATCHES, strategy={"zero_stage": stage}) for stage in range(4)]
    assert_equal_whole_batches(cases)


def manual_boring(rank: int, world: int) -> list[dict[str, Tensor]]:
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        module = ManualOptimBoringModel()
        run = trainer(
            world,
            strategy={"zero_stage": stage},
            plugins=Mesh3DPrecision("64-true"),
            max_epochs=1,
            use_distributed_sampler=False,
        )
        run.fit(module, loader(share((normal(index, 4, 32),), rank, world)[0] for index in range(4)))
        strategy: Any = run.strategy
        found.append(strategy.full_state_dict())
    return found


def test_lightnings_manual_demo_equals_one_device() -> None:
    ours, expected = run_spmd(manual_boring, 2)[0], run_spmd(manual_boring, 1)[0]
    for state, reference in zip(ours, expected, strict=True):
        for name, value in reference.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)


def test_micro_batches_in_manual_optimization_are_an_error() -> None:
    run_spmd(refused_manual, 1)


def refused_manual(rank: int, world: int) -> None:
    with pytest.raises(ModuleError, match=r"8 samples cannot be cut into 2 micro-batches(?s:.*)num_microbatches=1"):
        fit(rank, world, Fit(make=Gan, batches=BATCHES, strategy={"num_microbatches": 2}))
