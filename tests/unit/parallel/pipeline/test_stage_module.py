from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.parallel.pipeline.stage_module import Holder, StageModule


def test_a_stage_asks_who_runs_it() -> None:
    asked: list[Any] = []

    def run(stage: int, received: tuple[Tensor, ...], microbatch: int) -> Tensor:
        asked.append((stage, received, microbatch))
        return received[0] + 1

    stage = StageModule(3, [nn.Linear(2, 2)], [])
    stage.connect(run)
    value = torch.ones(2)
    assert torch.equal(stage(value, mb=5), value + 1)
    assert asked == [(3, (value,), 5)]


def test_a_holder_is_a_window_on_another_module() -> None:
    other = nn.Linear(2, 2)
    holder = Holder(other, frozenset({"weight"}))
    assert [name for name, _ in holder.named_parameters()] == ["weight"]
    holder.weight = nn.Parameter(torch.zeros(2, 2))
    assert other.weight is holder.weight
    other.weight = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(holder.weight, torch.ones(2, 2))
    with pytest.raises(AttributeError):
        _ = holder.bias
    del holder.weight
    assert not list(holder.parameters())
    assert [name for name, _ in other.named_parameters()] == ["bias"]
