from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_3d.parallel.tensor.hints import hinted_regions

_SMALL = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
_EXPERTS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model


def mixtral() -> MixtralForCausalLM:
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=2))


def test_experts_of_a_model_and_of_one_inside_another() -> None:
    assert hinted_regions(mixtral()) == _EXPERTS
    assert hinted_regions(Wrapped(mixtral())) == tuple(f"net.{name}" for name in _EXPERTS)
    assert hinted_regions(Wrapped(mixtral().model)) == tuple(name.replace("model", "net", 1) for name in _EXPERTS)


def test_the_plan_of_the_configuration_will_do() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"experts": nn.Identity()}) for _ in range(2))})
    assert hinted_regions(model) == ()
    model.config = SimpleNamespace(base_model_tp_plan={"layers.*.experts": "moe_tp_experts"})
    assert hinted_regions(model) == ("layers.0.experts", "layers.1.experts")


def test_dense_layers_give_no_hint() -> None:
    with torch.device("meta"):
        assert hinted_regions(LlamaForCausalLM(LlamaConfig(**_SMALL))) == ()
    assert hinted_regions(nn.Linear(2, 2)) == ()
