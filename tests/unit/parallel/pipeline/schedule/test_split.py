from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.parallel.pipeline.schedule.split import why_whole


def _input() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_plain_stage_may_be_split() -> None:
    x, stage = _input(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert why_whole([stage(x)], [x], list(stage.parameters())) is None
    other = nn.Parameter(torch.ones(2))
    assert why_whole([stage(x).sum() + other.sum()], [x], [*stage.parameters(), other]) is None


def test_a_weight_that_is_used_twice_is_not_split() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    parameters = list(stage.parameters())
    assert "two places" in str(why_whole([stage(stage(x))], [x], parameters))
    assert "two places" in str(why_whole([stage(x).sum() + stage.weight.sum()], [x], parameters))
    made = stage.weight.exp()
    assert "two places" in str(why_whole([(x @ made) @ made], [x], parameters))
    # By one function twice, or through a thing that is made of it twice.
    assert why_whole([x @ (made * made)], [x], parameters) is None
    assert why_whole([torch.addcmul(x, stage.bias, stage.bias)], [x], parameters) is None


def test_a_stage_that_recomputes_may_be_split() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    assert why_whole([checkpoint(stage, x, use_reentrant=False)], [x], list(stage.parameters())) is None


def test_several_tensors_are_not_split() -> None:
    x, y, stage = _input(), _input(), nn.Linear(4, 4)
    parameters = list(stage.parameters())
    assert "receives 2 and returns 1" in str(why_whole([stage(x + y)], [x, y], parameters))
    assert "receives 1 and returns 2" in str(why_whole([stage(x), stage(2 * x)], [x], parameters))


def test_tensors_without_gradients_do_not_count() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    plain = torch.ones(2)
    assert why_whole([stage(x), plain], [plain, x], list(stage.parameters())) is None


def test_a_frozen_stage_before_is_not_split() -> None:
    stage = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    assert "receives 0" in str(why_whole([stage(x)], [x], list(stage.parameters())))


def test_a_cut_way_is_not_split() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    assert "does not depend" in str(why_whole([stage(x.detach())], [x], list(stage.parameters())))


def test_functions_in_python_are_not_split() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    found = why_whole([Doubled.apply(stage(x))], [x], list(stage.parameters()))
    assert found == "Doubled is an autograd function written in Python"
    again = checkpoint(stage, x, use_reentrant=True)
    assert "CheckpointFunction" in str(why_whole([again], [x], list(stage.parameters())))


def test_tensors_of_others_are_not_split() -> None:
    x, stage = _input(), nn.Linear(4, 4)
    scale = torch.ones(4, requires_grad=True)
    assert "no parameter of the stage" in str(why_whole([stage(x) * scale], [x], list(stage.parameters())))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_not_split(register: str) -> None:
    x, stage = _input(), nn.Linear(4, 4)
    getattr(stage.weight, register)(lambda _: None)
    assert "has hooks" in str(why_whole([stage(x)], [x], list(stage.parameters())))
