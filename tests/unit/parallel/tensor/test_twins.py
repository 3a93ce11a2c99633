"""Modules that no step uses are cut as what they are a copy of."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.catalog import build, global_batches
from tests.unit.parallel.tensor.planned import Pair, Small, plan, states, styles

PAIR = {"up.weight": "column dim 0", "up.bias": "column dim 0", "down.weight": "row dim 1"}


class Kept(Small):
    """A model and modules beside it that its step does not call."""

    def __init__(self, model: nn.Module, **others: nn.Module) -> None:
        super().__init__(model)
        for name, other in others.items():
            self.add_module(name, other)


class Wrapper(nn.Module):
    """As torch's AveragedModel holds its copy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_copy_is_cut_as_its_original() -> None:
    model = Pair(F.gelu)
    found = plan(Kept(model, average=copy.deepcopy(model)), states(), 2)
    assert styles(found, "model.") == PAIR
    assert styles(found, "average.") == PAIR
    (row,) = [row for row in found.rows if row.name == "average.up.weight"]
    assert row.reason == "as model.up.weight, of which it is a copy"
    assert row.reason in str(found)


def test_a_packed_copy_with_ties_in_blocks() -> None:
    module: Any = build("packed GPT (tied)")
    module.average = Wrapper(copy.deepcopy(module.model).requires_grad_(False))
    found = plan(module, global_batches("packed GPT (tied)", 1, 4)[0], 2)
    layouts = found.layouts
    assert layouts["model.blocks.1.attention.pack.weight"].packed
    of_copy = {name.removeprefix("average.module."): layout for name, layout in layouts.items() if "average" in name}
    assert of_copy == {name.removeprefix("model."): layout for name, layout in layouts.items() if "average" not in name}


def test_other_classes_shapes_and_used_modules_stay() -> None:
    class Other(Pair):
        pass

    model = Pair(F.gelu)
    found = plan(Kept(model, other=Other(F.gelu), wide=Pair(F.gelu, inner=128)), states(), 2)
    assert not any(row.layout for row in found.rows if not row.name.startswith("model."))


class UsesWhole(nn.Module):
    """Uses a copy of what it calls in a way that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Pair(F.gelu)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + sum(each.sort().values.mean() for each in self.second.parameters())


def test_what_is_used_is_no_copy() -> None:
    found = plan(Small(UsesWhole()), states(), 2)
    assert styles(found, "model.first.") == PAIR
    assert not any(row.layout for row in found.rows if row.name.startswith("model.second."))


def test_the_plan_of_the_user_counts_for_copies() -> None:
    model = Pair(F.gelu)
    kept = Kept(model, average=copy.deepcopy(model))
    found = plan(kept, states(), 2, tensor_plan={"average.down": "replicate"})
    assert "average.down.weight" not in found.layouts
    assert "average.up.weight" in found.layouts
