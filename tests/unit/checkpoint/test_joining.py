"""Files whose tensors transformers joins while it loads: the same bits as from_pretrained gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_3d.checkpoint.huggingface import HuggingFaceTensors
from lightning_3d.checkpoint.pretrained import load_pretrained
from tests.marks import more

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=12),
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4),
    "qwen2": lambda: transformers.Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8),
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", more("olmoe"), more("qwen2")])
def test_experts_are_joined(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]()
    torch.manual_seed(1)
    stored = transformers.AutoModelForCausalLM.from_config(config)
    stored.save_pretrained(tmp_path, max_shard_size="20KB")
    names = HuggingFaceTensors(tmp_path).forms
    assert any(".experts.3." in name for name in names)
    module = nn.ModuleDict({"net": transformers.AutoModelForCausalLM.from_config(config)})
    report = load_pretrained(module, tmp_path, strict=True, group=None)
    assert report.matching.added == "net."
    found = module.state_dict()
    for name, value in stored.state_dict().items():
        assert torch.equal(found[f"net.{name}"], value), name


def test_files_that_are_joined_already_stay(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"]())
    save_file({name: value.contiguous() for name, value in stored.state_dict().items()}, tmp_path / "model.safetensors")
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"]())
    load_pretrained(module, tmp_path, strict=True, group=None)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in stored.state_dict().items())
