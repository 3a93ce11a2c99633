"""Gradient hooks that some ranks have and others have not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.shards.executor import Shard
from lightning_3d.strategy.setup import watching
from tests.unit.shards.twins import Twins

_GROUP: Any = None


def _shared(monkeypatch: pytest.MonkeyPatch, module: nn.Module, elsewhere: set[str]) -> frozenset[str]:
    monkeypatch.setattr(watching, "gather", lambda group, mine: [mine, frozenset(elsewhere)])
    return watching.share_gradient_hooks(module, _GROUP)


def test_a_hook_of_one_rank_sees_its_part_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = nn.Linear(4, 2), list[Tensor]()
    module.weight.register_hook(lambda gradient: seen.append(gradient) or 0 * gradient)
    assert _shared(monkeypatch, module, set()) == {"weight"}
    assert module.weight._backward_hooks is not None
    (hook,) = module.weight._backward_hooks.values()
    local = torch.ones(1, 4)
    assert hook(Shard(local, 0, (2,), Twins())) is None
    assert seen[0] is local
    module(torch.ones(1, 4)).sum().backward()
    assert module.weight.grad is not None
    assert float(module.weight.grad.sum()) == 8.0


def test_the_other_ranks_treat_the_parameter_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 2)
    assert _shared(monkeypatch, module, {"weight"}) == {"weight"}
    assert module.weight._backward_hooks
    assert not module.bias._backward_hooks


def test_hooks_of_all_ranks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 2)
    module.weight.register_hook(lambda gradient: 0 * gradient)
    assert not _shared(monkeypatch, module, {"weight"})
    module(torch.ones(1, 4)).sum().backward()
    assert module.weight.grad is not None
    assert float(module.weight.grad.abs().sum()) == 0.0
