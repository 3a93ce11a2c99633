from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

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
