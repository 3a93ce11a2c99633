from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.overrides import Overrides, plan_overrides


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)
        self.fc = Conv1D(20, 8)
        self.gate = nn.Parameter(torch.empty(8, 6))
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(8, 12)}) for _ in range(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 8)
        self.wpe = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def overrides(tensor_plan: Mapping[str, str] | None, degree: int = 2) -> Overrides:
    model = Model()
    return plan_overrides(model, parameter_table(model), tensor_plan, degree)


def styles(tensor_plan: Mapping[str, str], degree: int = 2) -> dict[str, str]:
    return {name: str(style) for name, style in overrides(tensor_plan, degree).styles.items()}


def test_nothing_is_said() -> None:
    assert overrides(None) == overrides({}) == Overrides()


def test_globs_of_modules_are_for_the_weights_that_they_own() -> None:
    assert styles({"*.qkv": "column:3", "blocks.1.proj": "row"}) == {
        "blocks.0.qkv.weight": "column:3",
        "blocks.1.qkv.weight": "column:3",
        "blocks.1.proj.weight": "row",
    }


def test_globs_of_parameters() -> None:
    assert styles({"*.0.qkv.bias": "column:3", "*.gate": "column"}) == {
        "blocks.0.qkv.bias": "column:3",
        "blocks.0.gate": "column",
        "blocks.1.gate": "column",
    }


def test_replicate_is_for_everything_below() -> None:
    found = overrides({"blocks.1": "replicate"})
    assert found.replicated == {
        name for name, _ in Model().named_parameters(remove_duplicate=False) if name.startswith("blocks.1.")
    }


def test_any_name_of_a_tied_weight_will_do_and_the_first_stands_for_it() -> None:
    assert styles({"head": "replicate"}) == styles({"head.weight": "replicate"}) == {"wte.weight": "replicate"}
    assert styles({"head": "vocab"}) == styles({"wte": "vocab"}) == {"wte.weight": "vocab"}


def test_the_last_glob_that_matches_decides() -> None:
    assert styles({"*.qkv": "replicate", "blocks.0.qkv": "column"})["blocks.0.qkv.weight"] == "column"
    assert styles({"blocks.0.qkv": "column", "*": "replicate"})["blocks.0.qkv.weight"] == "replicate"
    assert "blocks.0.qkv" not in overrides({"*.qkv": "local", "blocks.0.*": "replicate"}).regions


def test_local_regions_are_the_outermost_modules() -> None:
    found = overrides({"*.experts*": "local"})
    assert list(found.regions) == ["blocks.0.experts", "blocks.1.experts"]
    assert not found.styles


def test_decisions_travel() -> None:
    found = overrides({"*.qkv": "column:3", "*.experts": "local"})
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("tensor_plan", "degree", "fact", "valid"),
    [
        ({"*.qvk": "column"}, 2, "'*.qvk', which matches no module", "'*.qkv'"),
        ({"blocks.0.atn.qkv": "column"}, 2, "matches no module and no parameter", "'blocks.*.qkv'"),
        ({"zzzz": "row"}, 2, "matches no module and no parameter", ""),
        ({"*.qkv": "colum"}, 2, "unknown style 'colum'", "column, column:<segments>, row, vocab, replicate, local"),
        ({"*.qkv": "row:2"}, 2, "unknown style 'row:2'", "column:<segments>"),
        ({"*.qkv": "column:0"}, 2, "unknown style 'column:0'", "column:<segments>"),
        ({"*.qkv": "column"}, 5, "24 output features, which 5 ranks do not divide", "1, 2, 3, 4, 6, 8, 12, 24"),
        ({"*.qkv": "column:3"}, 3, "24 output features in 3 segments, which 3 ranks do not divide", "1, 2, 4, 8"),
        ({"*.qkv": "column:5"}, 2, "24 output features, which are no 5 equal segments", ""),
        ({"*.qkv": "row"}, 3, "8 input features, which 3 ranks do not divide", "1, 2, 4, 8"),
        ({"*.fc": "column"}, 8, "20 output features, which 8 ranks do not divide", "1, 2, 4, 5, 10, 20"),
        ({"*.fc": "row"}, 5, "8 input features, which 5 ranks do not divide", "1, 2, 4, 8"),
        ({"*.gate": "column"}, 5, "8 or 6 output features, which 5 ranks do not divide", "1, 2, 3, 4, 6, 8"),
        ({"*.qkv.bias": "column"}, 5, "24 output features, which 5 ranks do not divide", "24"),
        ({"wpe": "vocab"}, 2, "7 rows of its vocabulary, which 2 ranks do not divide", "1, 7, or pad_vocabulary=true"),
        ({"wpe": "column"}, 3, "8 output features, which 3 ranks do not divide", "1, 2, 4, 8"),
        ({"wpe": "row"}, 7, "its module (Embedding) is no linear layer", "vocab, column"),
        ({"*.qkv": "vocab"}, 2, "its module (Linear) is no embedding", "an nn.Embedding"),
        ({"*.fc": "vocab"}, 2, "its module (Conv1D) is no embedding", "an nn.Embedding"),
        ({"*.qkv.weight": "local"}, 2, "names parameters alone", "a glob of modules"),
        ({"blocks": "column"}, 2, "names blocks, which owns no weight matrix itself", "blocks.*.qkv, "),
        ({"*.norm": "column"}, 2, "owns no weight matrix itself", "modules or parameters with a weight matrix"),
    ],
)
def test_refusals_name_the_glob_the_numbers_and_what_would_do(
    tensor_plan: dict[str, str], degree: int, fact: str, valid: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        overrides(tensor_plan, degree)
    text = str(refusal.value)
    assert fact in refusal.value.fact
    assert repr(next(iter(tensor_plan))) in refusal.value.fact
    assert valid in text
    assert "fix: tensor_plan={" in text


def test_a_misspelt_style_is_put_right() -> None:
    with pytest.raises(PlanError, match=r"fix: tensor_plan=\{'\*\.qkv': 'column'\}"):
        overrides({"*.qkv": "colum"})
