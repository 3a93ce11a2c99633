"""What the last stage has found arrives on every rank of a pipeline, and so does what its metrics compute."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_3d.errors import BatchError, ModuleError
from lightning_3d.strategy.logging.metrics import MetricDoors
from lightning_3d.strategy.logging.relay import Relay
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

CPU = torch.device("cpu")


class Box:
    """An object of the user's, with a tensor in it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Owner(nn.Module):
    """Has metrics of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.cat, self.mean = SumMetric(), CatMetric(), MeanMetric()
        self.twice: Metric = self.sum + self.mean
        self.classes = ClasswiseWrapper(MulticlassAccuracy(2, average=None))
        self.children_of = nn.ModuleDict({"a": nn.Linear(1, 1)})


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def relay(module: nn.Module) -> Relay:
    return Relay(module, world(), world().size() - 1, CPU)


# ---- values ----


def sent_to_all(rank: int, size: int) -> None:
    module = Owner()
    last = relay(module)
    assert last.sends == (rank == size - 1)
    kinds = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    tensors = [torch.arange(6).reshape(2, 3).to(kind) for kind in kinds]
    found: Any = last.share(lambda: {"tensors": tensors, "box": Box(tensors[0][:, 1]), "text": ("a", 1, None)})
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype
        for one, other in zip(found["tensors"], tensors, strict=True)
    )
    assert torch.equal(found["box"].value, tensors[0][:, 1])
    assert found["text"] == ("a", 1, None)
    parts: Any = last.share(lambda: [module.sum, module.children_of["a"], torch.empty(0, 3)])
    assert parts[0] is module.sum
    assert parts[1] is module.children_of["a"]
    assert parts[2].shape == (0, 3)


def test_values_arrive() -> None:
    run_spmd(sent_to_all, 2)


def sent_in_parts(rank: int, size: int) -> None:
    last = relay(Owner())
    # Around the length of what one message takes.
    for length in (*range(3900, 4100, 3), 0, 100_000):
        assert last.share(lambda length=length: "a" * length) == "a" * length


def test_texts_of_any_length_arrive() -> None:
    run_spmd(sent_in_parts, 2)


def sent_without_dims(rank: int, size: int) -> tuple[bool, float]:
    found = relay(Owner()).share(lambda: [torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(2.0)], large=False)
    assert (found[0].shape, found[0].dtype) == ((2, 3), torch.bfloat16)
    return found[0].is_meta, float(found[1])


def test_large_values_stay() -> None:
    assert run_spmd(sent_without_dims, 2) == [(True, 2.0), (False, 2.0)]


def failed(rank: int, size: int) -> list[str]:
    def fail() -> None:
        raise BatchError("no such batch.", fix="another")

    found = []
    for kind, find in ((BatchError, fail), (ModuleError, lambda: lambda: None)):
        with pytest.raises(kind) as caught:
            relay(Owner()).share(find)
        found.append(str(caught.value))
    assert relay(Owner()).share(lambda: 3) == 3
    return found


def test_errors_arrive_too() -> None:
    first, second = run_spmd(failed, 2)
    assert first == second
    assert first[0] == "no such batch.\n  fix: another"
    assert "cannot be sent to the other ranks of the pipeline" in first[1]


# ---- metrics ----


def computed(rank: int, size: int) -> Any:
    module = Owner()
    alone = dist.new_group([rank], use_local_synchronization=True)
    doors = MetricDoors(module, alone, relay(module))
    doors.open()
    doors.open()
    with doors.alone():
        if rank == size - 1:
            for value in (1.0, 2.0):
                module.sum.update(value)
                module.mean(value)
                module.cat.update(torch.tensor([value, rank]))
            module.classes.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
            # In a step the other ranks do something else.
            assert float(module.mean.compute()) == 1.5
    copied = copy.deepcopy(module.sum)
    assert float(pickle.loads(pickle.dumps(module.sum)).sum_value) == float(copied.sum_value)
    found = [module.sum.compute(), module.cat.compute(), module.twice.compute(), *module.classes.compute().values()]
    module.sum.reset()
    doors.close()
    assert "dist_sync_fn" not in {name for name, value in vars(module.mean).items() if value is not None}
    return [each.tolist() for each in found]


def test_metrics_are_those_of_the_last_stage() -> None:
    first, second = run_spmd(computed, 2)
    assert first == second == [3.0, [1.0, 1.0, 2.0, 1.0], 4.5, 0.5, 1.0]


def unfinished(rank: int, size: int) -> None:
    module = Owner()
    doors = MetricDoors(module, world())

    def step(*, fails: bool) -> None:
        with doors.counting_if_finished():
            module.sum.update(1.0)
            module.mean(3.0)
            module.cat.update(torch.ones(2))
            if fails:
                raise KeyboardInterrupt

    step(fails=False)
    with pytest.raises(KeyboardInterrupt):
        step(fails=True)
    assert (float(module.sum.compute()), module.mean.update_count, len(module.cat.value)) == (1.0, 1, 1)


def test_a_step_that_is_not_finished_counts_nothing() -> None:
    run_spmd(unfinished, 1)
