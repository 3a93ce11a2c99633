from __future__ import annotations

import pytest
from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.parallel.pipeline.stacks import pipeline_stacks, tracked_modules
from tests.parity.catalog import build
from tests.unit.parallel.pipeline.planned import WIDTH, Deep, Norms, Small


def _names(module: nn.Module, wanted: str | list[str] | None = None) -> list[str]:
    return [stack.name for stack in pipeline_stacks(module, find_stacks(module), wanted)]


class Two(nn.Module):
    """Two lists of equal layers that are called one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module, times: int = 3) -> None:
        super().__init__()
        self.first = nn.ModuleList([first, *(type(first)(WIDTH, WIDTH) for _ in range(times - 1))])
        self.second = nn.ModuleList([second, second.__class__(WIDTH, WIDTH)])


class Encoder(nn.Linear):
    pass


class Decoder(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("HF Llama, 8 blocks", ["model.model.layers"]),
        ("HF T5, 4 + 4 blocks", ["model.encoder.block", "model.decoder.block"]),
        ("nn.Transformer", ["model.transformer.encoder.layers", "model.transformer.decoder.layers"]),
        ("residual network, 4 groups of 2", [f"model.layer{index}" for index in (1, 2, 3, 4)]),
        ("nn.Sequential MLP", ["model"]),
    ],
)
def test_stacks_of_models(name: str, stacks: list[str]) -> None:
    assert _names(build(name)) == stacks


def test_the_class_or_the_size_of_the_blocks_counts() -> None:
    assert _names(Two(Encoder(WIDTH, WIDTH), Decoder(WIDTH, WIDTH))) == ["first", "second"]
    assert _names(Two(Encoder(WIDTH, WIDTH), Decoder(WIDTH, 64))) == ["second"]
    assert _names(Two(Decoder(WIDTH, 1), Decoder(WIDTH, 64))) == ["first", "second"]


def test_names_go_before_what_is_found() -> None:
    module = Two(Encoder(WIDTH, WIDTH), Decoder(WIDTH, WIDTH))
    assert _names(module, "second") == ["second"]
    assert _names(module, ["second", "first"]) == ["first", "second"]


def test_any_list_of_layers_can_be_named() -> None:
    module = Small(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU(), "c": nn.LayerNorm(2)}))
    (stack,) = pipeline_stacks(module, find_stacks(module), "model")
    assert stack.blocks == ("model.a", "model.c")
    assert stack.kind == "Linear|LayerNorm"


def test_a_list_within_another_one_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"names model\.0, which lies within another list"):
        _names(Small(nn.Sequential(inner, nn.Linear(2, 2))), ["model", "model.0"])


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("model.block", "did you mean model.blocks"),
        ("model.enter", "is no list of two or more layers with parameters"),
        ([], "is no list"),
        (["model.blocks", "model.blocks"], r"names model\.blocks twice\."),
    ],
)
def test_other_names_are_refused(wanted: str | list[str], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        _names(Small(Deep()), wanted or [""])


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)] * 4), nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
)
def test_nothing_to_cut(model: nn.Module) -> None:
    with pytest.raises(PlanError, match="no list of two or more layers"):
        _names(Small(model))


def test_watched_are_the_largest_modules_that_can_be_called() -> None:
    module = Small(Norms())
    module.values = nn.ParameterList([nn.Parameter(module.model.enter.weight.clone())])
    module.named = nn.ModuleDict({"last": nn.Sequential(nn.Linear(2, 2)), "act": nn.ReLU()})
    assert tracked_modules(module, pipeline_stacks(module, find_stacks(module))) == (
        "model.enter",
        "model.leave",
        *(f"model.norms.{index}" for index in range(4)),
        "named.last",
    )
