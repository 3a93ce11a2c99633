"""Backwards in halves: taken where they are exact, and nowhere else; what fails in a stage is what is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_3d.parallel.pipeline.schedule.actions import SPLIT_SCHEDULES
from tests.spmd.pipeline_nets import Net, Pipeline, batch_of, signature_of
from tests.spmd.pipeline_odd_nets import (
    Cut,
    ExpandedGradients,
    Frozen,
    Hooked,
    HookedInside,
    OtherLeaf,
    OwnFunction,
    ReceivedGradient,
    Recomputed,
    Reentrant,
    SharedGradient,
    Skips,
    Tied,
    Unused,
    Views,
    random_net,
)
from tests.spmd.pool import SpmdError, run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

EXACT = (Net, SharedGradient, ReceivedGradient, ExpandedGradients, Views, Unused, Recomputed)
NOT_EXACT = (Skips, Tied, Cut, Frozen, Hooked, OtherLeaf, OwnFunction, Reentrant)
BATCH = (3, 3, 3, 3)


def kinds(schedule: str, make: Any, **options: Any) -> set[str]:
    """Trains two steps, whose gradients add up, and returns what stages beyond the first computed."""
    pipeline = Pipeline(schedule, make, **options)
    pipeline.engine.start_timeline()
    pipeline.train(batch_of(*BATCH))
    pipeline.train(batch_of(*BATCH, samples=2))
    return {event.action.kind for event in pipeline.engine.stop_timeline().events if event.action.stage}


def halves(rank: int, world: int) -> None:
    for schedule in SPLIT_SCHEDULES:
        for make in EXACT:
            assert {"F", "I", "W"} <= kinds(schedule, make), f"{schedule} {make.__name__}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_halves_are_exact(ranks: int) -> None:
    run_spmd(halves, ranks, timeout=120)


def wholes(rank: int, world: int) -> None:
    for schedule in SPLIT_SCHEDULES:
        for make in NOT_EXACT:
            assert kinds(schedule, make) == {"F", "B"}, f"{schedule} {make.__name__}"
        assert kinds(schedule, Net, whole_backward=True) == {"F", "B"}


def test_where_halves_are_not_exact_they_are_not_taken() -> None:
    run_spmd(wholes, 2, timeout=120)


def random_programs(rank: int, world: int) -> None:
    found = [kinds("zbvzerobubble", random_net(seed)) for seed in range(30)]
    assert sum("W" in kinds for kinds in found) > 10, "many are split"
    assert sum("B" in kinds for kinds in found) > 10, "many are not"


def test_halves_of_random_programs_are_exact() -> None:
    run_spmd(random_programs, 2, timeout=120)


def notices(rank: int, world: int) -> list[str]:
    import logging

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_3d.parallel.pipeline.engine")
    log.addHandler(handler)
    try:
        kinds("zbvzerobubble", Skips)
        kinds("dualpipev", Skips, whole_backward=True)
        kinds("1f1b", Skips)
        kinds("zbvzerobubble", HookedInside)
    finally:
        log.removeHandler(handler)
    return told


def test_each_rank_says_once_that_more_of_the_bubble_stays() -> None:
    first, second = run_spmd(notices, 2)
    assert [text.split(", so")[0] for text in first] == [
        "zbvzerobubble runs whole backwards",
        "dualpipev runs whole backwards",
    ]
    assert "receives 2" in first[0]
    # What all ranks know the first one says; of a stage its own rank knows.
    assert ["receives 2" in second[0], "stage 1: a parameter of shape" in second[1]] == [True, True]
    assert len(second) == 2


def units(rank: int, world: int, lazy: bool) -> None:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pipeline", "data"))["data"]
    batch = batch_of(*BATCH)
    for schedule in ("1f1b", "interleaved1f1b", *SPLIT_SCHEDULES):
        pipeline = Pipeline(schedule, whole_backward=True, lazy_units=lazy)
        pipeline.engine.learn(lambda: batch[0], signature_of(batch[0]))
        asked = {stage: _counted_unshards(fully_shard(module, mesh=mesh)) for stage, module in pipeline.modules.items()}
        pipeline.train(batch)
        pipeline.evaluate(batch)
        for calls in asked.values():
            assert bool(calls) == (schedule != "1f1b" and not lazy), f"{schedule}: {len(calls)} whole stages ahead"


def _counted_unshards(module: Any) -> list[bool]:
    """Counts how often someone asks a unit to gather its parameters, which its own forward does not need."""
    calls: list[bool] = []
    unshard = module.unshard

    def counted(async_op: bool = False) -> Any:
        calls.append(async_op)
        return unshard(async_op)

    module.unshard = counted
    return calls


@pytest.mark.parametrize("lazy", [False, True])
def test_units_are_gathered_by_themselves_where_they_should(lazy: bool) -> None:
    run_spmd(units, 2, lazy)


class Fails(Net):
    """Stage 1 fails in forward, or in backward."""

    where = "forward"

    def run(self, stage: int, received: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        (h,) = super().run(stage, received, x)
        if stage == 1 and torch.is_grad_enabled() and received and not isinstance(received[0], nn.Parameter):
            if self.where == "forward" and not received[0].is_leaf:
                raise KeyError("the user's own")
            if self.where == "backward":
                h.register_hook(_fail)
        return (h,)


class FailsInBackward(Fails):
    where = "backward"


def _fail(_: Tensor) -> None:
    raise KeyError("the user's own")


def failing(rank: int, world: int, schedule: str, make: Any) -> None:
    pipeline = Pipeline(schedule, make)
    # What the recording sees is no failure of a stage.
    record = Pipeline(schedule).runs.record
    object.__setattr__(pipeline.runs, "record", record)
    pipeline.engine.train(
        lambda index: batch_of(*BATCH)[index], lambda _, output: output["loss"], ["kind"] * len(BATCH)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbvzerobubble"])
@pytest.mark.parametrize("make", [Fails, FailsInBackward])
def test_the_users_own_error_is_told(schedule: str, make: Any) -> None:
    with pytest.raises(SpmdError) as caught:
        run_spmd(failing, 2, schedule, make)
    text = caught.value.reports[1]
    assert text.rstrip().endswith('KeyError: "the user\'s own"')
    assert "ailed to run" not in text


class Constant(Net):
    def output(self, sent: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.ones(()), "prediction": sent[0]}


def constant(rank: int, world: int) -> None:
    batch = batch_of(3, 3)
    Pipeline("1f1b", Constant).engine.train(lambda index: batch[index], lambda _, output: output["loss"], ["kind"] * 2)


def test_a_loss_that_depends_on_nothing_is_refused() -> None:
    with pytest.raises(SpmdError) as caught:
        run_spmd(constant, 2)
    assert "the loss of micro-batch 0 does not depend on any parameter that trains" in caught.value.reports[1]
