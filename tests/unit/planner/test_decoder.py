"""Decoders by formula: against the papers' equations, and against models that were traced."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.planner import DecoderShape
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
    block = decoder_model(shape).blocks[0]
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


def _kept(module: nn.Module, ids: torch.Tensor) -> int:
    """Bytes that live from forward to backward, parameters aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(ids)
    return sum(kept.values())


@pytest.mark.parametrize("form", ["gpt", "llama"])
def test_kept_activations_of_real_modules(form: str) -> None:
    """A block's, as the difference of three blocks and one, in 16 bit."""
    hidden, heads, sequence = 256, 4, 512
    shape = (
        DecoderShape(1, hidden, heads, 2, 768, 512, sequence)
        if form == "llama"
        else DecoderShape(1, hidden, heads, heads, 4 * hidden, 512, sequence)
    )
    ids = torch.zeros(1, sequence, dtype=torch.long)
    sizes = []
    for layers in (1, 3):
        module: nn.Module
        if form == "llama":
            module = Llama(512, hidden, 768, layers, heads, 2, sequence)
            for block in module.blocks:
                # Without a GPU RMSNorm is many operations, each of which keeps something; LayerNorm is one everywhere.
                for name, norm in list(block.named_children()):
                    if isinstance(norm, nn.RMSNorm):
                        setattr(block, name, nn.LayerNorm(hidden, bias=False))
        else:
            module = GPT(512, hidden, layers, heads, sequence)
        sizes.append(_kept(module.to(torch.bfloat16), ids))
    found = (sizes[1] - sizes[0]) / 2
    assert found == pytest.approx(decoder_model(shape).blocks[0].keeps("none").on_rank(1, False), rel=0.1)


def test_impossible_shapes() -> None:
    with pytest.raises(ConfigError, match="heads=7 does not divide hidden=64"):
        DecoderShape(1, 64, 7, 7, 256, 100, 10)
    with pytest.raises(ConfigError, match="layers=0"):
        DecoderShape(0, 64, 8, 8, 256, 100, 10)
