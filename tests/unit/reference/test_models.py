"""The decoders against Hugging Face's with the same weights, in fp64: logits and every gradient."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.reference import GPT, Llama

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")


def ids(vocab: int = 97, length: int = 12) -> Tensor:
    return torch.randint(vocab, (3, length), generator=torch.Generator().manual_seed(1))


def small_llama(**options: object) -> Llama:
    defaults: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_length": 16,
    }
    return Llama(**{**defaults, **options})  # type: ignore[arg-type]


def small_gpt(**options: object) -> GPT:
    defaults: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_length": 16,
    }
    return GPT(**{**defaults, **options})  # type: ignore[arg-type]


class ExactRotary(nn.Module):
    """Hugging Face computes its rotary angles in fp32 even in an fp64 model; this does it in x's precision."""

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        self.head_size, self.theta = head_size, theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.theta ** (-torch.arange(0, self.head_size, 2).to(x) / self.head_size)
        angles = torch.cat([position_ids[..., None].to(x) * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()


def llama_pair(tied: bool) -> tuple[Llama, nn.Module, dict[str, str]]:
    ours = small_llama(tie_weights=tied, rope_theta=500.0).double()
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double()
    theirs.model.rotary_emb = ExactRotary(8, 500.0)
    # Hugging Face's RMSNorm computes in fp32 too.
    for name, module in list(theirs.named_modules()):
        if name.endswith("norm"):
            theirs.set_submodule(name, nn.RMSNorm(32, eps=module.variance_epsilon).double())
    names = {
        r"^token_embedding": "model.embed_tokens",
        r"^norm": "model.norm",
        r"^head": "lm_head",
        r"^blocks": "model.layers",
        r"attention_norm": "input_layernorm",
        r"feed_forward_norm": "post_attention_layernorm",
        r"feed_forward\.(gate|up|down)": r"mlp.\1_proj",
        r"attention\.(q|k|v|o)[a-z]+": r"self_attn.\1_proj",
    }
    return ours, theirs, names


def gpt_pair(tied: bool) -> tuple[GPT, nn.Module, dict[str, str]]:
    ours = small_gpt(tie_weights=tied).double()
    config = transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    theirs = transformers.GPT2LMHeadModel(config).double()
    names = {
        r"^token_embedding": "transformer.wte",
        r"^position_embedding": "transformer.wpe",
        r"^norm": "transformer.ln_f",
        r"^head": "lm_head",
        r"^blocks": "transformer.h",
        r"attention_norm": "ln_1",
        r"feed_forward_norm": "ln_2",
        r"feed_forward\.up": "mlp.c_fc",
        r"feed_forward\.down": "mlp.c_proj",
        r"attention\.query_key_value": "attn.c_attn",
        r"attention\.output": "attn.c_proj",
    }
    return ours, theirs, names


def renamed(name: str, names: dict[str, str]) -> str:
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


Pair = Callable[[bool], tuple[nn.Module, nn.Module, dict[str, str]]]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("pair", [llama_pair, gpt_pair])
def test_logits_and_gradients_equal_hugging_face(pair: Pair, tied: bool) -> None:
    torch.manual_seed(0)
    ours, theirs, names = pair(tied)
    conv1d = transformers.pytorch_utils.Conv1D
    transposed = {f"{n}.weight" for n, m in theirs.named_modules() if isinstance(m, conv1d)}
    target = dict(theirs.named_parameters())
    matched = {name: renamed(name, names) for name, _ in ours.named_parameters()}
    assert sorted(matched.values()) == sorted(target)

    def view(name: str, tensor: Tensor) -> Tensor:
        return tensor.T if name in transposed else tensor

    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            view(matched[name], target[matched[name]]).copy_(parameter)
    weight = torch.randn(3, 12, 97, dtype=torch.float64)
    logits, expected = ours(ids()), theirs(ids()).logits
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    for name, parameter in ours.named_parameters():
        grad = view(matched[name], target[matched[name]].grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_output_shape_and_causality(build: Callable[[], nn.Module]) -> None:
    model, tokens = build().eval(), ids()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 12, 97)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_first_weights(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = build(hidden_size=256, num_layers=8)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            end = name.endswith(("attention.output.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if end else 0.02, rel=0.05), name
        else:
            assert parameter.eq(0 if name.endswith("bias") else 1).all(), name


def test_a_tied_head_is_the_embedding() -> None:
    for build in (small_gpt, small_llama):
        for tied in (True, False):
            model = build(tie_weights=tied)
            assert (model.head.weight is model.token_embedding.weight) == tied


def test_dropout_acts_in_training_only() -> None:
    model = small_gpt(dropout=0.5)
    assert not torch.equal(model(ids()), model(ids()))
    model.eval()
    assert torch.equal(model(ids()), model(ids()))


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_a_model_built_on_the_meta_device_needs_its_parameters_alone(build: Callable[[], nn.Module]) -> None:
    eager = build().eval()
    with torch.device("meta"):
        late = build().eval()
    late.to_empty(device="cpu").load_state_dict(eager.state_dict())
    assert torch.equal(late(ids()), eager(ids()))


def test_rotary_angles_keep_their_precision_when_the_model_does_not() -> None:
    rotary = small_llama().to(torch.bfloat16).rotary
    tokens = torch.zeros(1, 4000, dtype=torch.int64)
    cos, _ = rotary(tokens, torch.bfloat16)
    exact, _ = rotary(tokens, torch.float64)
    assert cos.dtype == torch.float32
    assert exact.dtype == torch.float64
    torch.testing.assert_close(cos.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_bf16_stays_bf16(build: Callable[[], nn.Module]) -> None:
    assert build().to(torch.bfloat16)(ids()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (small_gpt, {"num_heads": 5}, "num_heads=5 does not divide hidden_size=32"),
        (small_llama, {"num_heads": 0}, "num_heads=0 does not divide hidden_size=32"),
        (small_llama, {"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4\n  valid: 1, 2, 4"),
        (small_llama, {"num_heads": 32, "num_kv_heads": 32}, "= 1 is odd"),
    ],
)
def test_impossible_sizes(build: Callable[..., nn.Module], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_a_sequence_too_long(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="17 tokens is longer than the model's max_length=16"):
        build()(ids(length=17))
