"""Decoders by formula: against the papers' equations, and against models that were traced."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.plan.traced import TracedPart, trace_model
from lightning_3d.planner import MEGATRON, THIS_LIBRARY, DecoderShape
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.model import total_parameters
from lightning_3d.reference.gpt import GPT
from lightning_3d.reference.llama import Llama
from tests.unit.planner import tables


def test_parameters_of_sc21() -> None:
    for line, row in zip(tables.lines("megatron_sc21_table1"), tables.sc21(), strict=True):
        shape = row.shape
        equation = 12 * shape.layers * shape.hidden**2
        equation *= 1 + 13 / (12 * shape.hidden) + (shape.vocab + shape.sequence) / (12 * shape.layers * shape.hidden)
        # The final norm is not in equation 2.
        assert total_parameters(decoder_model(shape)) == pytest.approx(equation, rel=1e-5)
        assert equation / 1e9 == pytest.approx(float(line["params_from_eq2(derived)"]), rel=0.005)


def test_parameters_of_mpt_and_llama() -> None:
    for line, row in zip(tables.lines("llm_foundry_mpt"), tables.mpt(), strict=True):
        # MPT has no biases.
        assert total_parameters(decoder_model(row.shape)) == pytest.approx(float(line["n_params"]), rel=2e-3)
    sizes = {"8B": 8.03e9, "70B": 70.55e9, "405B": 405.85e9}
    for line in tables.lines("llama3_architectures"):
        shape = DecoderShape(
            *(int(line[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")), sequence=8192
        )
        assert total_parameters(decoder_model(shape)) == pytest.approx(sizes[line["model"]], rel=1e-3)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_kept_activations_of_korthikanti(tensor: int, sequence_parallel: bool) -> None:
    shape = tables.gpt(1, 6144, 64)
    block = decoder_model(shape, MEGATRON).blocks[0]
    state = shape.sequence * shape.hidden
    cut = 24 + 5 * shape.heads * shape.sequence / shape.hidden
    expected = state * (10 / (tensor if sequence_parallel else 1) + cut / tensor)
    found = block.keeps("none").on_rank(tensor, sequence_parallel) + block.scores / tensor
    assert found == pytest.approx(expected, rel=1e-12)
    assert block.keeps("full").on_rank(1, False) == 2 * state


@pytest.mark.parametrize("gated", [False, True])
def test_products_that_tensor_ranks_sum_are_kept_by_one_rank_alone(gated: bool) -> None:
    kept = decoder_model(DecoderShape(1, 64, 4, 4, 256, 100, 32, gated=gated)).blocks[0].keeps("selective")
    state = 2 * 32 * 64
    assert kept.on_rank(1, False) == state + kept.cut + 2 * state
    assert kept.on_rank(2, False) == state + kept.cut / 2
    assert kept.on_rank(4, True) == (state + kept.cut) / 4


def _traced(shape: DecoderShape, *, fused_norms: bool) -> TracedPart:
    """A block of a reference model, in 16 bit; a norm that is one operation everywhere stands for a GPU's RMSNorm."""
    hidden, sequence = shape.hidden, shape.sequence
    model: nn.Module
    if shape.is_gated:
        model = Llama(64, hidden, shape.ffn_hidden, 2, shape.heads, shape.kv_heads, sequence)
        for block in model.blocks if fused_norms else ():
            for name in ("attention_norm", "feed_forward_norm"):
                setattr(block, name, nn.LayerNorm(hidden, bias=False))
    else:
        model = GPT(64, hidden, 2, shape.heads, sequence, shape.ffn_hidden)
    ids = torch.zeros(1, sequence, dtype=torch.long)
    module = LightningModule()
    module.model = model.to(torch.bfloat16)
    return trace_model(module, lambda: module.model(ids).sum()).blocks[1]


@pytest.mark.parametrize("fused_norms", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(2, 256, 2, 2, 1024, 64, 128, gated=True),
        DecoderShape(2, 256, 4, 2, 768, 64, 256),
        DecoderShape(2, 512, 8, 1, 1536, 64, 128),
        DecoderShape(2, 256, 4, 4, 1024, 64, 256),
        DecoderShape(2, 256, 2, 2, 512, 64, 128, gated=False),
    ],
)
def test_kept_activations_are_those_of_a_trace(shape: DecoderShape, fused_norms: bool) -> None:
    block = decoder_model(shape, replace(THIS_LIBRARY, fused_norms=fused_norms)).blocks[0]
    traced = _traced(shape, fused_norms=fused_norms).kept
    # What is computed again holds its input, which autograd does not save.
    held = {"none": 0, "selective": block.state, "full": block.state}
    found = {kind: block.keeps(kind).on_rank(1, False) for kind in held}
    assert found == pytest.approx({kind: traced[kind] + held[kind] for kind in held}, rel=0.02)


def test_impossible_shapes() -> None:
    with pytest.raises(ConfigError, match="heads=7 does not divide hidden=64"):
        DecoderShape(1, 64, 7, 7, 256, 100, 10)
    with pytest.raises(ConfigError, match="layers=0"):
        DecoderShape(0, 64, 8, 8, 256, 100, 10)
