"""Sequence parallelism: sums leave parts of the sequence, and what needs the whole gathers it once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random
from tests.unit.shards.rules.modules import Leaves

SIZES = (2, 3, 4)
BATCH, STEPS, WIDTH, HEADS, WORDS = 2, 12, 24, 12, 36
TOKENS = torch.arange(BATCH * STEPS).view(BATCH, STEPS) * 7 % WORDS


def exchanges(count: int) -> Mapping[str, int]:
    return {"sum_part": count, "gather": count}


def llama(
    tokens: Tensor, table: Tensor, q: Tensor, kv: Tensor, o: Tensor, up: Tensor, down: Tensor, norm: Tensor
) -> Tensor:
    """A block between a tied embedding and the loss."""
    x = F.embedding(tokens, table)
    hidden = F.rms_norm(x, (WIDTH,), norm)
    query, key = (F.linear(hidden, weight).view(*tokens.shape, HEADS, -1).transpose(1, 2) for weight in (q, kv))
    attended = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(*tokens.shape, -1), o)
    hidden = F.rms_norm(x, (WIDTH,), norm)
    x = x + F.linear(F.silu(F.linear(hidden, up)) * F.linear(hidden, up * 2), down)
    logits = F.linear(F.rms_norm(x, (WIDTH,), norm), table)
    return F.cross_entropy(logits.view(-1, WORDS), tokens.roll(1, 1).view(-1))


@pytest.mark.parametrize("size", SIZES)
def test_a_block_gathers_as_often_as_it_sums(size: int) -> None:
    weights = [random(WORDS, WIDTH), *(random(WIDTH, WIDTH, seed=seed) for seed in range(3))]
    tensors = [TOKENS, *weights, random(48, WIDTH), random(WIDTH, 48), random(WIDTH)]
    cuts = {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, 6: 1}
    ran = agree(llama, tensors, cuts, size, sequence=True, tolerance=1e-11)
    assert ran.forward == {**exchanges(3), "max": 1, "sum": 1}
    # One sum for all uses of the norm.
    assert ran.backward == {**exchanges(3), "sum": 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_tokens_in_one_dim(size: int, batch: int) -> None:
    tokens = torch.arange(batch * STEPS).view(batch, STEPS) % WORDS

    def block(tokens: Tensor, table: Tensor, up: Tensor, bias: Tensor, down: Tensor, last: Tensor) -> Tensor:
        x = F.embedding(tokens, table)
        for _ in range(2):
            hidden = F.layer_norm(x, (WIDTH,))
            inner = torch.addmm(bias, hidden.view(-1, WIDTH), up).view(batch, STEPS, 48)
            x = x + torch.addmm(last, F.gelu(inner).view(-1, 48), down).view(batch, STEPS, WIDTH)
        return x

    tensors = [tokens, random(WORDS, WIDTH), random(WIDTH, 48), random(48), random(48, WIDTH), random(WIDTH)]
    ran = agree(block, tensors, {1: 0, 2: 1, 3: 0, 4: 0}, size, sequence=True, tolerance=1e-11)
    assert ran.cuts == (Layout(1, (STEPS,)),)
    assert ran.forward == {"sum_part": 3, "gather": 2}
    assert ran.backward == {"sum_part": 2, "gather": 3, "sum": 1}


def test_rows_that_were_never_gathered_are_summed() -> None:
    ran = agree(F.linear, [random(8, 4), random(6, 4)], {1: 1}, 2, sequence=True)
    assert (ran.cuts, ran.forward) == ((None,), {"sum": 1})


def test_a_sequence_that_cannot_be_cut_is_summed() -> None:
    ran = agree(F.linear, [random(2, 5, 4), random(6, 4)], {0: 2, 1: 1}, 2, sequence=True)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"sum": 1}, {})


def test_the_bias_of_a_sum_is_added_to_each_part() -> None:
    ran = agree(F.linear, [random(2, 6, 4), random(6, 4), random(6)], {0: 2, 1: 1}, 2, sequence=True)
    assert (ran.forward, ran.backward) == ({"sum_part": 1}, {"gather": 1, "sum": 1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"batch_first": True, "norm_first": True}])
def test_layers_of_torch(size: int, options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 36, 0.0, dtype=torch.float64, **options)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    named = dict(build().named_parameters())
    packed = Cut(dim=0, segments=(WIDTH,) * 3)
    ends: dict[str, Cut | int] = {"out_proj.weight": 1, "linear2.weight": 1, "linear1.weight": 0, "linear1.bias": 0}
    cuts: dict[int, Cut | int] = {}
    for index, name in enumerate(named):
        cut = packed if "in_proj" in name else next((cut for end, cut in ends.items() if name.endswith(end)), None)
        if cut is not None:
            cuts[1 + index] = cut

    def encoder(x: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = Leaves(build())((x * 2,), parameters)
        return result

    ran = agree(encoder, [random(12, 12, WIDTH), *named.values()], cuts, size, sequence=True, tolerance=1e-10)
    # The first attention has an input that every rank knows and leaves its result so.
    assert ran.forward == {"sum": 1, "sum_part": 5, "gather": 4}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [1, 2, 4, 12])
def test_keys_of_whole_weights_are_gathered_along_their_sequence(size: int, shared: int) -> None:
    def attention(x: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        hidden = x * 2
        query, key = (F.linear(hidden, weight).view(BATCH, STEPS, -1, 2).transpose(1, 2) for weight in (q, kv))
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=shared < HEADS)

    tensors = [random(BATCH, STEPS, WIDTH), random(WIDTH, WIDTH), random(2 * shared, WIDTH)]
    ran = agree(attention, tensors, {0: 1, 1: 0}, size, sequence=True)
    assert (ran.cuts, ran.forward) == ((Layout(1, (HEADS,)),), {"gather": 2})
    assert ran.backward == {"sum_part": 2, "sum": 1}


def test_inputs_cut_along_heads_are_no_sequence() -> None:
    agree(F.linear, [random(2, 4, 5, 3), random(6, 3)], {0: 1, 1: 0}, 2, gathers=["linear"])


def test_without_gradients_one_gather_serves_all() -> None:
    def projections(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        hidden = x * 2
        with torch.no_grad():
            plain = F.linear(hidden, k)
        return F.linear(hidden, q) + plain

    tensors = [random(2, 6, 4), random(8, 4), random(8, 4, seed=1)]
    # A gather that knows no gradients is not taken for one that does.
    assert agree(projections, tensors, {0: 1, 1: 0, 2: 0}, 2, sequence=True).forward == {"gather": 2}
    assert agree(torch.no_grad()(projections), tensors, {0: 1, 1: 0, 2: 0}, 2, sequence=True).forward == {"gather": 1}
    assert agree(torch.inference_mode()(projections), tensors, {0: 1, 1: 0, 2: 0}, 2, sequence=True).forward == {
        "gather": 2
    }
