"""Recorded initialisation against the eager one, on models that nobody wrote for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.record import InitRecorder

transformers.logging.set_verbosity_error()


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            pad_token_id=3,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        )
    )


def convnext() -> nn.Module:
    """Its stochastic depth asks a tensor for values while it is built."""
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[16, 16, 32, 32], depths=[1, 2, 1, 1], drop_path_rate=0.2)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2)


def convnet() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64)
    )
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(network, nn.Flatten(), nn.Linear(64, 10))


def lstm() -> nn.Module:
    return nn.LSTM(32, 48, num_layers=2, bidirectional=True)


def attention() -> nn.Module:
    return nn.MultiheadAttention(64, 4)


MODELS = [llama, gpt2, bert, vit, convnext, encoder, convnet, lstm, attention]


def assert_alike(name: str, drawn: Tensor, eager: Tensor) -> None:
    """Compares two samples: equal constants, and moments and extremes within what chance allows."""
    assert drawn.shape == eager.shape
    assert drawn.dtype == eager.dtype
    assert drawn.stride() == eager.stride()
    a, b, count = drawn.detach().double(), eager.detach().double(), drawn.numel()
    assert (a == 0).sum() == (b == 0).sum(), name
    spread = b.std().item() if count > 1 else 0.0
    if spread == 0.0:
        assert torch.equal(a, b), name
        return
    # Six standard errors of the difference of two means and of two deviations.
    assert abs(a.mean() - b.mean()) <= 6 * spread * math.sqrt(2 / count), name
    assert abs(a.std() - b.std()) <= 6 * spread / math.sqrt(count), name
    assert abs(a.max() - b.max()) <= 2 * spread, name
    assert abs(a.min() - b.min()) <= 2 * spread, name
    assert not torch.equal(a, b), name


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_statistics_and_buffers_equal_the_eager_ones(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(11)
    eager = build()
    recorder = InitRecorder(5)
    with recorder:
        module = build()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    state = torch.get_rng_state()
    identities = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    materialise(module, recorder.tape(module), device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)

    expected = dict(eager.named_parameters(remove_duplicate=False))
    drawn = dict(module.named_parameters(remove_duplicate=False))
    assert list(drawn) == list(expected)
    assert {name: id(parameter) for name, parameter in drawn.items()} == identities
    for name, parameter in expected.items():
        assert_alike(name, drawn[name], parameter)
        assert drawn[name].requires_grad == parameter.requires_grad
    assert len({*map(id, drawn.values())}) == len({*map(id, expected.values())})
    for (name, buffer), (other, value) in zip(module.named_buffers(), eager.named_buffers(), strict=True):
        assert name == other
        torch.testing.assert_close(buffer, value, rtol=0, atol=0)


def test_model_runs_as_the_eager_one_with_the_same_weights() -> None:
    recorder = InitRecorder(5)
    with recorder:
        module = llama()
    materialise(module, recorder.tape(module), device=torch.device("cpu"))
    eager = llama()
    eager.load_state_dict(module.state_dict())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(module(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_while_building_is_kept(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        recorder = InitRecorder(5)
        with recorder:
            module = bert()
        eager = bert()
    finally:
        torch.set_default_dtype(torch.float32)
    materialise(module, recorder.tape(module), device=torch.device("cpu"))
    assert torch.get_default_dtype() == torch.float32
    for (name, parameter), value in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert_alike(name, parameter, value)
        assert parameter.dtype == dtype


@pytest.mark.parametrize("context", [contextlib.nullcontext(), torch.device("meta")], ids=["plain", "meta"])
def test_a_users_own_meta_context_changes_nothing(context: contextlib.AbstractContextManager[None]) -> None:
    recorder = InitRecorder(5)
    with recorder, context:
        module = gpt2()
    tape = recorder.tape(module)
    assert abs(tape.value("transformer.wte.weight").std().item() - 0.02) < 1e-3
    assert abs(tape.value("transformer.h.1.mlp.c_proj.weight").std().item() - 0.02 / math.sqrt(4)) < 1e-3


def test_pretrained_weights_loaded_while_recording(tmp_path: Path) -> None:
    eager = llama()
    eager.save_pretrained(tmp_path)
    recorder = InitRecorder(5)
    with recorder:
        module = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    materialise(module, recorder.tape(module), device=torch.device("cpu"))
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, loaded), (other, saved) in zip(tensors(module), tensors(eager), strict=True):
            assert name == other
            assert torch.equal(loaded, saved), name
