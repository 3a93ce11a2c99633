from __future__ import annotations

from torch import nn
from torchmetrics import MeanMetric

from lightning_3d.graph.blocks import containers, find_stacks, outer_modules
from tests.parity.catalog import build


def test_stacks_of_models_nobody_changed() -> None:
    expected = {
        "HF GPT-2 (tied)": ["model.transformer.h: 3 x GPT2Block"],
        "HF Llama": ["model.model.layers: 3 x LlamaDecoderLayer"],
        "HF BERT": ["model.bert.encoder.layer: 3 x BertLayer"],
        "nn.TransformerEncoder": ["model.encoder.layers: 3 x TransformerEncoderLayer"],
        "ConvNet with BatchNorm": [],
    }
    for name, stacks in expected.items():
        assert [str(stack) for stack in find_stacks(build(name))] == stacks


def test_outer_modules_are_the_largest_beside_the_blocks() -> None:
    gpt = build("HF GPT-2 (tied)")
    stacks = find_stacks(gpt)
    names = ("wte", "wpe", "drop", "ln_f")
    assert outer_modules(gpt, stacks) == (*(f"model.transformer.{name}" for name in names), "model.lm_head")
    assert containers(gpt, stacks) == ("model", "model.transformer", "model.transformer.h")
    plain = build("ConvNet with BatchNorm")
    assert outer_modules(plain, ()) == ("model",)
    assert containers(plain, ()) == ()


def test_what_is_no_stack() -> None:
    linear = nn.Linear(2, 2)
    module = nn.ModuleDict(
        {
            "one": nn.ModuleList([linear]),
            "mixed": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
            "empty": nn.ModuleList(),
            "without_parameters": nn.Sequential(nn.ReLU(), nn.ReLU()),
            "metrics": nn.ModuleList([MeanMetric(), MeanMetric()]),
            "two": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        }
    )
    assert [stack.name for stack in find_stacks(module)] == ["two"]


def test_the_outermost_list_counts() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    module = nn.ModuleDict({"outer": nn.ModuleList(inner), "metric": MeanMetric(), "head": nn.Linear(2, 2)})
    stacks = find_stacks(module)
    assert [stack.blocks for stack in stacks] == [("outer.0", "outer.1")]
    assert outer_modules(module, stacks) == ("head",)
