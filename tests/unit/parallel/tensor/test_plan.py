from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import PlanError
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.parallel.tensor.traffic import Traffic
from tests.parity.catalog import build, global_batches
from tests.parity.models import NextToken

Styles = Mapping[str, str]
MEGATRON = Traffic(forward=2, backward=2)
# Vocabulary-parallel: the embedding's sum, the loss' largest logit and its sums; the gradient of the head's input.
LANGUAGE_MODEL = Traffic(forward=3, backward=1)


def plan(module: L.LightningModule, batch: Any, size: int, **options: Any) -> TensorPlan:
    return find_tensor_plan(
        module,
        lambda: module.training_step(batch, 0),
        parameters=parameter_table(module),
        stacks=find_stacks(module),
        size=size,
        **options,
    )


def plan_of(name: str, size: int, **options: Any) -> TensorPlan:
    return plan(build(name), global_batches(name, 1, 4)[0], size, **options)


def styles(found: TensorPlan, prefix: str) -> dict[str, str]:
    """Style and layout of each parameter below a module that is cut; weights that are whole, by their reason."""
    shown = {}
    for row in found.rows:
        if row.name.startswith(prefix) and (row.layout is not None or row.reason):
            what = f"{row.style} {row.layout}" if row.layout is not None else row.reason
            shown[row.name.removeprefix(prefix)] = what
    return shown


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
MODELS: list[tuple[str, str, Styles, Traffic, Traffic]] = [
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
        Traffic(forward=0, backward=0),
    ),
    ("HF T5 encoder", "model.encoder.block.1.", T5_LAYER, MEGATRON, Traffic(forward=1, backward=0)),
    (
        "HF T5",
        "model.decoder.block.1.",
        {
            **{name.replace("layer.1", "layer.2"): style for name, style in T5_LAYER.items()},
            **{f"layer.1.EncDecAttention.{name}.weight": style for name, style in T5_ATTENTION.items()},
        },
        # One more for the memory, whose gradient is summed beside that of the hidden state.
        Traffic(forward=3, backward=4),
        Traffic(forward=4, backward=1),
    ),
    ("nn.TransformerEncoder", "model.encoder.layers.1.", ENCODER_LAYER, MEGATRON, Traffic(forward=1, backward=0)),
    (
        "nn.Transformer",
        "model.transformer.decoder.layers.1.",
        {**ENCODER_LAYER, **CROSS_ATTENTION},
        Traffic(forward=3, backward=4),
        Traffic(forward=4, backward=1),
    ),
    (
        "SwiGLU",
        "model.1.",
        {"gate.weight": "column dim 0", "up.weight": "column dim 0", "down.weight": "row dim 1"},
        Traffic(forward=1, backward=1),
        Traffic(forward=0, backward=0),
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
    name: str, prefix: str, expected: Styles, block: Traffic, outside: Traffic
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
    assert found.traffic["model.model.layers.1"] == Traffic(forward=2, backward=4)


def test_norms_of_heads_have_partial_gradients() -> None:
    found = plan_of("HF Qwen3", 2)
    assert found.partial == {
        f"model.model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in "qk"
    }
    assert plan_of("HF Llama (GQA)", 2).partial == frozenset()


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
    assert found.traffic["model.model.layers.1"] == Traffic(forward=2, backward=3)
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
    assert found.traffic["model.model.layers.1"] == Traffic(forward=2, backward=0)


# ---- small models ----


class Small(L.LightningModule):
    """Any model on hidden states or ids, with a loss that asks nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.model(batch)
        return output.square().mean() if isinstance(output, Tensor) else output


def states(width: int = 32) -> Tensor:
    return torch.zeros(2, 6, width)


def small_plan(model: nn.Module, size: int = 2, batch: Tensor | None = None, **options: Any) -> TensorPlan:
    return plan(Small(model), states() if batch is None else batch, size, **options)


class Pair(nn.Module):
    """A column and a row weight with something between."""

    def __init__(self, between: Callable[[Tensor], Tensor], inner: int = 64, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(inner)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Both(nn.Module):
    """A pair that can be cut, then what is tested: so that there always is a plan."""

    def __init__(self, tested: nn.Module) -> None:
        super().__init__()
        self.plain, self.tested = Pair(F.gelu), tested

    def forward(self, x: Tensor) -> Any:
        return self.tested(self.plain(x))


def reasons(model: nn.Module, size: int = 2, **options: Any) -> dict[str, str]:
    found = small_plan(Both(model), size, **options)
    assert styles(found, "model.plain.") == {
        "up.weight": "column dim 0",
        "up.bias": "column dim 0",
        "down.weight": "row dim 1",
    }
    return styles(found, "model.tested.")


def test_norms_between_leave_both_weights_whole() -> None:
    pair = Pair(F.gelu)
    pair.between = lambda x: pair.norm(x)
    found = reasons(pair)
    assert found["up.weight"] == "layer_norm over the dim that is cut"
    assert found["down.weight"] == "its outputs meet activations that are whole"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (Doubled.apply, "custom autograd function Doubled"),
        (Passed.apply, "custom autograd function Passed"),
        (lambda x: checkpoint(F.gelu, x, use_reentrant=True), "custom autograd function CheckpointFunction"),
    ],
    ids=["computes", "passes", "reentrant checkpoint"],
)
def test_foreign_autograd_functions_take_whole_tensors(between: Callable[[Tensor], Tensor], reason: str) -> None:
    assert reason in reasons(Pair(between))["up.weight"]


def test_checkpoints_without_reentry_are_seen_through() -> None:
    found = reasons(Pair(lambda x: checkpoint(F.gelu, x, use_reentrant=False)))
    assert found["up.weight"] == "column dim 0"
    assert found["down.weight"] == "row dim 1"


def test_columns_without_a_row_are_whole() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.score = nn.Linear(32, 96), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.alone(x).sort().values.mean() + self.score(x).logsumexp(-1).mean()

    found = reasons(Mixed())
    assert found["alone.weight"] == "sort over the dim that is cut"
    assert found["score.weight"] == "8 outputs of 32 inputs save less than the sums of gradients cost"
    head = reasons(nn.Linear(32, 96))
    assert head["weight"] == "column dim 0"


def test_logits_may_leave_the_step() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            return {"loss": logits.logsumexp(-1).mean(), "logits": logits}

    assert reasons(Logits())["head.weight"] == "column dim 0"


def test_a_residual_is_not_cut_for_outputs_without_a_row() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    assert reasons(Whole())["linear.weight"] == "its outputs meet activations that are whole"


def test_weights_of_one_row_are_whole_together() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    free = reasons(Gated())
    assert (free["gate.weight"], free["down.weight"]) == ("column dim 0", "row dim 1")
    found = reasons(Gated(), tensor_plan={"*.tested.gate": "replicate"})
    assert found["gate.weight"] == "tensor_plan['*.tested.gate']='replicate'"
    assert found["up.weight"] == "its outputs meet activations that are whole"
    found = reasons(Gated(), tensor_plan={"*.tested.down": "replicate"})
    assert found["up.weight"].startswith("the row weight model.tested.down.weight that would sum its outputs stays")


def test_adapters_beside_frozen_weights() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down = nn.Linear(32, 64).requires_grad_(False), nn.Linear(64, 32)
            self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(8, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.base(x) + 2 * self.b(F.dropout(self.a(x)))))

    found = reasons(Adapted())
    assert found["a.weight"] == "an inner width of 8 beside 64 saves less than its sums cost"
    assert (found["base.weight"], found["b.weight"], found["down.weight"]) == (
        "column dim 0",
        "column dim 0",
        "row dim 1",
    )


def test_weights_that_are_used_in_two_ways_are_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.square(F.gelu(self.square(x)))

    assert reasons(Twice())["square.weight"] == "it is used in two ways: column dim 0, row dim 1"


def test_products_with_exchanged_weights() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.up.T) @ self.down

    assert reasons(Written()) == {"up": "column dim 0", "down": "row dim 0"}


def test_one_projection_of_images() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            batch, count, width = x.shape
            q, k, v = self.qkv(x).reshape(batch, count, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)
            return x + self.proj(mixed.reshape(batch, count, width))

    for size in (2, 4):
        found = reasons(Timm(), size)
        assert found["qkv.weight"] == "column dim 0 in 32|32|32"
        assert found["proj.weight"] == "row dim 1"


# ---- numbers that do not divide ----


class Sized(nn.Module):
    """GPT-2 XL's awkward numbers: a vocabulary and heads that few degrees divide."""

    def __init__(self, vocabulary: int = 50257, heads: int = 25, width: int = 100) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Pair(F.gelu, 4 * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.linear(self.mlp(x), self.tokens.weight)


def sized_plan(size: int) -> TensorPlan:
    with torch.device("meta"):
        module = Sized()
    return small_plan(module, size, torch.zeros(2, 6, dtype=torch.long))


def test_vocabularies_and_heads_that_do_not_divide() -> None:
    found = sized_plan(4)
    shown = styles(found, "model.")
    assert shown["tokens.weight"] == "50257 rows are not a multiple of 4"
    assert shown["qkv.weight"].startswith("25 heads are not a multiple of 4")
    assert shown["mlp.up.weight"] == "column dim 0"
    assert shown["mlp.down.weight"] == "row dim 1"
    assert 0 < found.share < 0.05
    shown = styles(sized_plan(5), "model.")
    assert shown["qkv.weight"] == "column dim 0 in 100|100|100"
    assert shown["tokens.weight"] == "50257 rows are not a multiple of 5"


def test_heads_of_torchs_own_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    assert styles(small_plan(layer, 4), "model.self_attn") == {
        ".in_proj_weight": "2 heads are not a multiple of 4",
        ".out_proj.weight": "2 heads are not a multiple of 4",
    }


def test_nothing_to_cut_lists_what_would_do() -> None:
    with pytest.raises(PlanError, match="tensor_parallel_size=7: no parameter") as caught:
        small_plan(Pair(F.gelu, 60, 30), 7, states(30))
    text = str(caught.value)
    assert "60 rows are not a multiple of 7" in text
    assert "valid: tensor_parallel_size of 1, 2, 3, 4, 5, 6, 12" in text


# ---- the user's own plan ----


def test_styles_that_the_user_wants() -> None:
    wanted = {"*.tested.up": "column", "*.tested.down": "row"}
    pair = Pair(F.gelu)
    pair.between = lambda x: pair.norm(x)
    found = small_plan(Both(pair), tensor_plan=wanted)
    shown = styles(found, "model.tested.")
    assert (shown["up.weight"], shown["down.weight"]) == ("column dim 0", "row dim 1")
    assert {row.source for row in found.rows if row.name.startswith("model.tested.up.w")} == {"plan"}
    assert "[plan]" in str(found)


def test_blocks_with_styles_of_their_own() -> None:
    found = plan_of("HF Llama (GQA)", 2, tensor_plan={"*.layers.1.mlp.up_proj": "replicate"})
    assert styles(found, "model.model.layers.0.") == LLAMA
    shown = styles(found, "model.model.layers.1.")
    assert shown["mlp.up_proj.weight"].startswith("tensor_plan[")
    assert shown["mlp.gate_proj.weight"] == "its outputs meet activations that are whole"


def test_a_style_without_a_use_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Unflatten(1, (2, 3)), nn.Flatten(1, 2), Pair(F.gelu))
    model.append(nn.Conv1d(6, 6, 1))
    with pytest.raises(PlanError, match=r"model.4.weight: the step uses it in no linear layer"):
        small_plan(model, tensor_plan={"model.4": "column"})


# ---- the plan itself ----


def test_the_plan_is_printed_and_travels() -> None:
    found = plan_of("HF Llama (GQA)", 4)
    text = str(found)
    assert "4 ranks, 89.8% of 21.7k parameters are cut" in text
    assert "model.model.layers.* x 2: 2 forward + 4 backward" in text
    assert "outside of blocks: 3 forward + 1 backward" in text
    folded = next(line for line in text.splitlines() if "q_proj" in line)
    assert folded.split() == ["model.model.layers.*.self_attn.q_proj.weight", "x", "2", "column", "dim", "0", "32x32"]
    assert pickle.loads(pickle.dumps(found)) == found
    cut = sum(row.numel for row in found.rows if row.layout is not None)
    assert found.share == cut / parameter_table(build("HF Llama (GQA)")).numel
    assert found.layouts["model.lm_head.weight"].segments == (96,)
