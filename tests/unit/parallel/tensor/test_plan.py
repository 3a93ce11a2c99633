from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.parallel.tensor.trace.exchanges import Collectives
from tests.parity.catalog import build, global_batches
from tests.parity.models import NextToken
from tests.unit.parallel.tensor.planned import plan, plan_of, styles

Styles = Mapping[str, str]
MEGATRON = Collectives(forward=2, backward=2)
# The gradient of the relative positions, which all blocks share, is gathered from the heads.
WITH_BIAS = MEGATRON + Collectives(gathers=(0, 1))
# Vocabulary-parallel: the embedding's sum, the loss' largest logit and its sums; the gradient of the head's input.
LANGUAGE_MODEL = Collectives(forward=3, backward=1)

LLAMA = {
    "self_attn.q_proj.weight": "column dim 0",
    "self_attn.k_proj.weight": "column dim 0",
    "self_attn.v_proj.weight": "column dim 0",
    "self_attn.o_proj.weight": "row dim 1",
    "mlp.gate_proj.weight": "column dim 0",
    "mlp.up_proj.weight": "column dim 0",
    "mlp.down_proj.weight": "row dim 1",
}
GPT2 = {
    "attn.c_attn.weight": "column dim 1 in 32|32|32",
    "attn.c_attn.bias": "column dim 0 in 32|32|32",
    "attn.c_proj.weight": "row dim 0",
    "mlp.c_fc.weight": "column dim 1",
    "mlp.c_fc.bias": "column dim 0",
    "mlp.c_proj.weight": "row dim 0",
}
PACKED_GPT = {
    "attention.pack.weight": "column dim 0 in 32|32|32",
    "attention.pack.bias": "column dim 0 in 32|32|32",
    "attention.out.weight": "row dim 1",
    "mlp.0.weight": "column dim 0",
    "mlp.0.bias": "column dim 0",
    "mlp.2.weight": "row dim 1",
}
ENCODER_LAYER = {
    "self_attn.in_proj_weight": "column dim 0 in 32|32|32",
    "self_attn.in_proj_bias": "column dim 0 in 32|32|32",
    "self_attn.out_proj.weight": "row dim 1",
    "linear1.weight": "column dim 0",
    "linear1.bias": "column dim 0",
    "linear2.weight": "row dim 1",
}
CROSS_ATTENTION = {
    "multihead_attn.in_proj_weight": "column dim 0 in 32|32|32",
    "multihead_attn.in_proj_bias": "column dim 0 in 32|32|32",
    "multihead_attn.out_proj.weight": "row dim 1",
}
T5_ATTENTION = {"q": "column dim 0", "k": "column dim 0", "v": "column dim 0", "o": "row dim 1"}
T5_LAYER = {
    **{f"layer.0.SelfAttention.{name}.weight": style for name, style in T5_ATTENTION.items()},
    "layer.1.DenseReluDense.wi_0.weight": "column dim 0",
    "layer.1.DenseReluDense.wi_1.weight": "column dim 0",
    "layer.1.DenseReluDense.wo.weight": "row dim 1",
}

# Model, a block that is not the first of its stack, its styles, its all-reduces and those outside of all blocks.
MODELS: list[tuple[str, str, Styles, Collectives, Collectives]] = [
    ("HF Llama (GQA)", "model.model.layers.1.", LLAMA, MEGATRON, LANGUAGE_MODEL),
    ("HF Qwen3", "model.model.layers.1.", LLAMA, MEGATRON, LANGUAGE_MODEL),
    ("HF GPT-2 (sdpa)", "model.transformer.h.1.", GPT2, MEGATRON, LANGUAGE_MODEL),
    ("HF GPT-2 (eager)", "model.transformer.h.1.", GPT2, MEGATRON, LANGUAGE_MODEL),
    ("packed GPT (tied)", "model.blocks.1.", PACKED_GPT, MEGATRON, LANGUAGE_MODEL),
    ("packed GPT, eager attention", "model.blocks.1.", PACKED_GPT, MEGATRON, LANGUAGE_MODEL),
    (
        "HF Phi3",
        "model.model.layers.1.",
        {
            "self_attn.qkv_proj.weight": "column dim 0 in 32|32|32",
            "self_attn.o_proj.weight": "row dim 1",
            "mlp.gate_up_proj.weight": "column dim 0 in 48|48",
            "mlp.down_proj.weight": "row dim 1",
        },
        MEGATRON,
        LANGUAGE_MODEL,
    ),
    (
        "HF GPT-NeoX",
        "model.gpt_neox.layers.1.",
        {
            # q, k and v stand together for each head: no segments.
            "attention.query_key_value.weight": "column dim 0",
            "attention.query_key_value.bias": "column dim 0",
            "attention.dense.weight": "row dim 1",
            "mlp.dense_h_to_4h.weight": "column dim 0",
            "mlp.dense_h_to_4h.bias": "column dim 0",
            "mlp.dense_4h_to_h.weight": "row dim 1",
        },
        MEGATRON,
        LANGUAGE_MODEL,
    ),
    (
        "HF ViT",
        "model.layers.1.",
        {
            **{f"attention.{name}_proj.{key}": "column dim 0" for name in "qkv" for key in ("weight", "bias")},
            "attention.o_proj.weight": "row dim 1",
            "mlp.fc1.weight": "column dim 0",
            "mlp.fc1.bias": "column dim 0",
            "mlp.fc2.weight": "row dim 1",
        },
        MEGATRON,
        Collectives(forward=0, backward=0),
    ),
    ("HF T5 encoder", "model.encoder.block.1.", T5_LAYER, WITH_BIAS, Collectives(forward=1, backward=0)),
    (
        "HF T5",
        "model.decoder.block.1.",
        {
            **{name.replace("layer.1", "layer.2"): style for name, style in T5_LAYER.items()},
            **{f"layer.1.EncDecAttention.{name}.weight": style for name, style in T5_ATTENTION.items()},
        },
        # One more for the memory, whose gradient is summed beside that of the hidden state.
        WITH_BIAS + Collectives(forward=1, backward=2),
        Collectives(forward=4, backward=1),
    ),
    ("nn.TransformerEncoder", "model.encoder.layers.1.", ENCODER_LAYER, MEGATRON, Collectives(forward=1, backward=0)),
    (
        "nn.Transformer",
        "model.transformer.decoder.layers.1.",
        {**ENCODER_LAYER, **CROSS_ATTENTION},
        Collectives(forward=3, backward=4),
        Collectives(forward=4, backward=1),
    ),
    (
        "SwiGLU",
        "model.1.",
        {"gate.weight": "column dim 0", "up.weight": "column dim 0", "down.weight": "row dim 1"},
        Collectives(forward=1, backward=1),
        Collectives(forward=0, backward=0),
    ),
    (
        "reference Llama",
        "model.blocks.1.",
        {
            **{f"attention.{name}.weight": "column dim 0" for name in ("query", "key", "value")},
            "attention.output.weight": "row dim 1",
            **{f"feed_forward.{name}.weight": "column dim 0" for name in ("gate", "up")},
            "feed_forward.down.weight": "row dim 1",
        },
        MEGATRON,
        LANGUAGE_MODEL,
    ),
    (
        "reference GPT",
        "model.blocks.1.",
        {
            "attention.query_key_value.weight": "column dim 0 in 32|32|32",
            "attention.query_key_value.bias": "column dim 0 in 32|32|32",
            "attention.output.weight": "row dim 1",
            "feed_forward.up.weight": "column dim 0",
            "feed_forward.up.bias": "column dim 0",
            "feed_forward.down.weight": "row dim 1",
        },
        MEGATRON,
        LANGUAGE_MODEL,
    ),
]


@pytest.mark.parametrize(("name", "prefix", "expected", "block", "outside"), MODELS, ids=[row[0] for row in MODELS])
def test_models_are_cut_as_megatron_does(
    name: str, prefix: str, expected: Styles, block: Collectives, outside: Collectives
) -> None:
    found = plan_of(name, 2)
    assert styles(found, prefix) == dict(expected)
    assert found.traffic[prefix[:-1]] == block
    assert found.traffic[""] == outside


def test_vocabularies_and_heads() -> None:
    assert styles(plan_of("HF Llama (GQA)", 2), "model.lm_head") == {".weight": "column dim 0"}
    assert plan_of("HF Llama (GQA)", 2).layouts["model.model.embed_tokens.weight"].dim == 0
    # The tied head goes by the embedding's name.
    tied = plan_of("packed GPT (tied)", 2)
    assert styles(tied, "model.tokens") == {".weight": "vocab dim 0"}
    assert styles(tied, "model.places") == {
        ".weight": "a table of 12 rows saves less than the sums of its look-ups cost"
    }
    assert not any(row.name.startswith("model.head") for row in tied.rows)
    bert = plan_of("HF BERT", 2)
    assert styles(bert, "model.cls") == {
        ".predictions.bias": "column dim 0",
        ".predictions.transform.dense.weight": "layer_norm over the dim that is cut",
    }
    assert bert.traffic[""] == LANGUAGE_MODEL


@pytest.mark.parametrize(("name", "heads"), [("HF Llama (GQA)", "2 heads are"), ("HF Gemma", "1 head is")])
def test_too_few_heads_of_keys_are_whole(name: str, heads: str) -> None:
    found = plan_of(name, 4)
    shown = styles(found, "model.model.layers.1.self_attn.")
    assert shown["q_proj.weight"] == "column dim 0"
    assert shown["o_proj.weight"] == "row dim 1"
    for each in ("k_proj.weight", "v_proj.weight"):
        assert shown[each].startswith(f"{heads} not a multiple of 4")
    assert found.traffic["model.model.layers.1"] == MEGATRON


def test_norms_of_heads_have_partial_gradients() -> None:
    found = plan_of("HF Qwen3", 2)
    assert found.partial == {
        f"model.model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in "qk"
    }
    assert plan_of("HF Llama (GQA)", 2).partial == frozenset()


@pytest.mark.parametrize("name", ["HF Llama (GQA)", "HF Gemma", "HF Qwen3"])
def test_whole_keys_and_values_have_partial_gradients(name: str) -> None:
    found = plan_of(name, 4)
    weights = {"k_proj.weight", "v_proj.weight"} | ({"q_norm.weight", "k_norm.weight"} if name == "HF Qwen3" else set())
    assert found.partial == {f"model.model.layers.{layer}.self_attn.{weight}" for layer in (0, 1) for weight in weights}
    assert found.traffic["model.model.layers.0"] == found.traffic["model.model.layers.1"] == MEGATRON
    count = 2 * len(weights)
    assert f"one all-reduce for each optimizer step: gradients of {count} parameters" in str(found)


def test_what_sequences_meet_has_partial_gradients() -> None:
    found = plan_of("packed GPT (tied)", 2, sequence=True)
    blocks = [f"model.blocks.{block}.{name}" for block in (0, 1) for name in ("norm1", "norm2")]
    norms = {f"{name}.{kind}" for name in (*blocks, "model.norm") for kind in ("weight", "bias")}
    rows = {f"model.blocks.{block}.{name}.bias" for block in (0, 1) for name in ("attention.out", "mlp.2")}
    assert found.partial == {*norms, *rows, "model.places.weight"}
    assert found.layouts == plan_of("packed GPT (tied)", 2).layouts
    assert found.traffic["model.blocks.1"] == Collectives(scatters=(2, 2), gathers=(2, 2))
    assert "model.blocks.* x 2: reduce-scatters 2 forward + 2 backward, all-gathers 2 forward + 2 backward" in str(
        found
    )
    norms = {f"layers.{layer}.{name}_layernorm.weight" for layer in (0, 1) for name in ("input", "post_attention")}
    expected = {f"model.model.{name}" for name in (*norms, "norm.weight")}
    assert plan_of("HF Llama (GQA)", 2, sequence=True).partial == expected


def test_packed_weights_with_fewer_keys() -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    found = plan(NextToken(Phi3ForCausalLM(config)), global_batches("HF Phi3", 1, 2)[0], 4)
    shown = styles(found, "model.model.layers.1.")
    assert shown["self_attn.qkv_proj.weight"] == "column dim 0 in 64|32|32"
    assert found.traffic["model.model.layers.1"] == MEGATRON


def test_experts_are_local_regions() -> None:
    found = plan_of("HF Mixtral", 2)
    shown = styles(found, "model.model.layers.1.mlp.")
    assert shown == {
        "gate.weight": "4 outputs of 32 inputs save less than the sums of gradients cost",
        "experts.gate_up_proj": "local dim 1 in 48|48",
        "experts.down_proj": "local dim 2",
    }
    assert [region.module for region in found.regions] == [f"model.model.layers.{each}.mlp.experts" for each in (0, 1)]
    # One for attention and one for the experts; backward also the weights of the choices.
    assert found.traffic["model.model.layers.1"] == Collectives(forward=2, backward=3)
    assert "[hint]" in str(found)


def test_meta_modules_have_the_same_plan() -> None:
    for name in ("HF Qwen3", "HF GPT-2 (sdpa)", "nn.TransformerEncoder"):
        with torch.device("meta"):
            module = build(name)
        assert plan(module, global_batches(name, 1, 4)[0], 2) == plan_of(name, 2)


def test_plans_are_alike_whatever_the_step() -> None:
    module, batch = build("HF Llama (GQA)"), global_batches("HF Llama (GQA)", 1, 4)[0]

    def predict() -> Tensor:
        with torch.no_grad():
            return module.logits(batch[0])

    found = find_tensor_plan(module, predict, parameters=parameter_table(module), stacks=find_stacks(module), size=2)
    trained = plan(module, batch, 2)
    assert found.layouts == trained.layouts
    assert found.traffic["model.model.layers.1"] == Collectives(forward=2, backward=0)


def test_blocks_with_styles_of_their_own() -> None:
    found = plan_of("HF Llama (GQA)", 2, tensor_plan={"*.layers.1.mlp.up_proj": "replicate"})
    assert styles(found, "model.model.layers.0.") == LLAMA
    shown = styles(found, "model.model.layers.1.")
    assert shown["mlp.up_proj.weight"].startswith("tensor_plan[")
    assert shown["mlp.gate_proj.weight"] == "its outputs meet activations that are whole"


# ---- the plan itself ----


def test_the_plan_is_printed_and_travels() -> None:
    found = plan_of("HF Llama (GQA)", 4)
    text = str(found)
    assert "4 ranks, 89.8% of 21.7k parameters are cut" in text
    assert "model.model.layers.* x 2: all-reduces 2 forward + 2 backward" in text
    assert "outside of blocks: all-reduces 3 forward + 1 backward" in text
    folded = next(line for line in text.splitlines() if "q_proj" in line)
    assert folded.split() == ["model.model.layers.*.self_attn.q_proj.weight", "x", "2", "column", "dim", "0", "32x32"]
    assert pickle.loads(pickle.dumps(found)) == found
    cut = sum(row.numel for row in found.rows if row.layout is not None)
    assert found.share == cut / parameter_table(build("HF Llama (GQA)")).numel
    assert found.layouts["model.lm_head.weight"].segments == (96,)
