from __future__ import annotations

import random
from collections import deque
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, SumMetric

from lightning_3d.graph.quiet import quiet


class Busy(L.LightningModule):
    """Changes everything that a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.mean, self.cat = MeanMetric(), CatMetric()
        self.seen: list[int] = [1]
        self.table: dict[str, int] = {"a": 1}
        self.kinds: set[int] = {1}
        self.count, self.name, self.last = 0, "start", None

    def step(self) -> Tensor:
        output = self.layer(torch.randn(4, 2))
        self.mean(output.detach())
        self.cat.update(output.detach())
        self.seen.append(2)
        self.table["b"] = 2
        self.kinds.add(2)
        self.count += 1
        self.name, self.last = "end", "step"  # type: ignore[assignment]
        self.log("loss", output.mean())
        return output


class Fails(Busy):
    def fail(self) -> None:
        self.step()
        raise ZeroDivisionError


def trace(module: Busy) -> dict[str, Any]:
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    plain = (list(module.seen), dict(module.table), set(module.kinds), module.count, module.name, module.last)
    metrics = (
        float(module.mean.mean_value),
        float(module.mean.weight),
        len(module.cat.value),
        module.mean._update_count,
    )
    return {"buffers": buffers, "plain": plain, "metrics": metrics, "random": torch.get_rng_state()}


def test_a_step_leaves_no_trace() -> None:
    module = Busy()
    module.mean.update(torch.tensor(3.0))
    before, held = trace(module), module.seen
    with quiet(module):
        module.step()
        module.step()
        assert module.count == 2
    after = trace(module)
    torch.testing.assert_close(after["buffers"], before["buffers"], rtol=0, atol=0)
    assert after["plain"] == before["plain"]
    assert after["metrics"] == before["metrics"]
    assert torch.equal(after["random"], before["random"])
    assert module.seen is held
    assert float(module.mean.compute()) == 3.0


def test_graphs_of_earlier_steps_see_no_change() -> None:
    module = Busy()
    weight = torch.ones(3, requires_grad=True)
    softmax = weight.softmax(0)
    module.seen.append(softmax)
    with torch.no_grad():
        module.seen.append(softmax.view(3))
    with quiet(module):
        softmax.data.add_(1)
    assert torch.equal(torch.stack(module.seen[-2:]), torch.full((2, 3), 1 / 3))
    softmax[0].backward()
    torch.testing.assert_close(weight.grad, torch.tensor([2.0, -1.0, -1.0]) / 9)


def test_no_trace_after_an_error_either() -> None:
    module = Fails()
    with pytest.raises(ZeroDivisionError), quiet(module):
        module.fail()
    assert (module.count, module.seen) == (0, [1])
    assert "log" not in vars(module)


def test_log_may_be_left_to_the_caller() -> None:
    module = Busy()
    heard: list[str] = []
    module.__dict__["log"] = lambda name, value: heard.append(name)
    with quiet(module, keep_log=True):
        module.step()
    assert heard == ["loss"]
    with quiet(module):
        module.step()
    assert heard == ["loss"]
    assert "log" in vars(module)


class Meter:
    """A plain object that counts, as scripts have them."""

    def __init__(self) -> None:
        self.total, self.values = 0, [0]


class Remembers(L.LightningModule):
    """Keeps what a step computes in every way but buffers and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(2)
        self.running = torch.zeros(2)
        self.outputs: dict[str, list[int]] = {"val": []}
        self.recent: deque[int] = deque([1], maxlen=2)
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("table", torch.zeros(2))

    def step(self) -> None:
        self.average = self.average + 1
        self.running += 1
        self.outputs["val"].append(1)
        self.recent.extend([2, 3])
        self.meter.total += 1
        self.meter.values.append(1)
        self.cache = torch.ones(3)
        self.table = torch.ones(5)
        torch.rand(2, generator=self.generator)
        random.random()
        np.random.rand()


def test_whatever_a_step_keeps_is_forgotten() -> None:
    module = Remembers()
    average, table, drawn = module.average, module.table, module.generator.get_state()
    states = random.getstate(), np.random.get_state()[1].copy()
    with quiet(module):
        module.step()
    assert module.average is average
    assert module.table is table
    assert module.running.tolist() == [0, 0]
    assert module.outputs == {"val": []}
    assert list(module.recent) == [1]
    assert (module.meter.total, module.meter.values) == (0, [0])
    assert not hasattr(module, "cache")
    assert torch.equal(module.generator.get_state(), drawn)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()


class Draws(L.LightningModule):
    """Draws from everything that a module may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = {"numpy": np.random.default_rng(0)}
        self.rng, self.legacy, self.python = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
        self.stream = iter(range(100))
        self.plain = {"seen": SumMetric()}

    def draw(self) -> tuple[float, ...]:
        self.plain["seen"].update(1.0)
        numbers = (self.rng.random(), self.legacy.rand(), self.python.random(), self.generators["numpy"].random())
        return (*map(float, numbers), float(next(self.stream)))


def test_generators_iterators_and_plainly_held_metrics_are_put_back() -> None:
    module, expected = Draws(), Draws()
    for _ in range(3):
        with quiet(module):
            module.draw()
            module.draw()
    assert [module.draw(), module.draw()] == [expected.draw(), expected.draw()]
    assert module.plain["seen"].compute() == 2.0


class Counted(L.LightningDataModule):
    """Its hook counts batches, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, [0]
        self.generator = torch.Generator().manual_seed(1)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        self.seen.append(self.count)
        return batch + torch.rand((), generator=self.generator)


def test_objects_beside_the_module_are_put_back() -> None:
    data = Counted()
    with quiet(Draws(), data, None):
        first = data.on_after_batch_transfer(torch.zeros(1), 0)
    assert (data.count, data.seen) == (0, [0])
    torch.testing.assert_close(data.on_after_batch_transfer(torch.zeros(1), 0), first, rtol=0, atol=0)


def test_the_profiler_hears_nothing() -> None:
    module, profiler = Draws(), SimpleProfiler()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler=profiler)
    with quiet(module), module.trainer.profiler.profile("step"):
        pass
    assert not profiler.recorded_durations
    assert module.trainer.profiler is profiler
