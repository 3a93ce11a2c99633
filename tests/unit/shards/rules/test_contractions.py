"""Products of matrices: what they give, how they are cut, and how often the ranks exchange values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random
from tests.unit.shards.threads import ThreadShardGroup, run_threads

SIZES = (2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", ["none", "cut", "whole"])
def test_column_sums_the_gradients_of_its_input_once(size: int, bias: str) -> None:
    tensors = [random(2, 5, 8), random(24, 8), *([] if bias == "none" else [random(24)])]
    cuts = {1: 0, **({2: 0} if bias == "cut" else {})}
    ran = agree(F.linear, tensors, cuts, size)
    assert ran.cuts == (Layout(2, (24,)),)
    assert ran.forward == {}
    assert ran.backward == ({"sum": 1, "gather": 1} if bias == "whole" else {"sum": 1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_row_sums_its_results_once(size: int, bias: bool, packed: bool) -> None:
    segments = (12, 24) if packed else (36,)
    tensors = [random(2, 5, 36), random(7, 36), *([random(7)] if bias else [])]
    cut = Cut(dim=1, segments=segments)
    ran = agree(F.linear, tensors, {0: Cut(dim=2, segments=segments), 1: cut}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"sum": 1}, {})
    ran = agree(F.linear, tensors, {1: cut}, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"gather": 1})


@pytest.mark.parametrize("size", SIZES)
def test_one_input_of_many_columns_has_one_sum(size: int) -> None:
    def mlp(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        hidden = x * 2
        return F.linear(F.linear(hidden, q) * F.linear(hidden, k) + F.linear(hidden, v), o)

    weights = [random(12, 6, seed=seed) for seed in range(3)]
    ran = agree(mlp, [random(4, 6), *weights, random(6, 12)], {1: 0, 2: 0, 3: 0, 4: 1}, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"sum": 1})


def test_norms_of_heads_between_columns_leave_the_sum_alone() -> None:
    def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        hidden = x * 2
        query = F.rms_norm(F.linear(hidden, q).view(3, 4, 2), (2,), q_norm)
        key = F.rms_norm(F.linear(hidden, k).view(3, 4, 2), (2,), k_norm)
        return query * key + F.linear(hidden, v).view(3, 4, 2)

    weights = [random(8, 6, seed=seed) for seed in range(3)]
    ran = agree(projections, [random(3, 6), *weights, random(2), random(2, seed=1)], {1: 0, 2: 0, 3: 0}, 2)
    assert ran.backward == {"sum": 3}


@pytest.mark.parametrize("size", SIZES)
def test_whole_weight_on_tokens_that_are_cut(size: int) -> None:
    ran = agree(F.linear, [random(2, 12, 4), random(3, 4), random(3)], {0: 1}, size)
    assert ran.cuts == (Layout(1, (12,)),)
    assert (ran.forward, ran.backward) == ({}, {"sum": 2})


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_inputs_times_outputs(size: int) -> None:
    bias, x, weight, back, last = random(24), random(5, 6), random(6, 24), random(24, 6), random(6)

    def conv1d(x: Tensor, weight: Tensor, bias: Tensor, back: Tensor, last: Tensor) -> Tensor:
        return torch.addmm(last, F.gelu(torch.addmm(bias, x, weight)), back)

    segments = (12, 12)
    packed = Cut(dim=1, segments=segments)
    cuts = {1: packed, 2: Cut(dim=0, segments=segments), 3: Cut(dim=0, segments=segments)}
    ran = agree(conv1d, [x, weight, bias, back, last], cuts, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"sum": 1})
    assert agree(lambda x, weight: x @ weight, [x, weight], {1: packed}, size).backward == {"sum": 1}
    ran = agree(
        lambda x, back: x @ back, [random(2, 3, 24), back], {0: Cut(dim=2, segments=segments), 1: cuts[3]}, size
    )
    assert ran.forward == {"sum": 1}


@pytest.mark.parametrize("size", SIZES)
def test_products_of_activations(size: int) -> None:
    query, key = random(2, 12, 5, 3), random(2, 12, 3, 4)
    for function in (torch.matmul, lambda a, b: a @ b, Tensor.matmul):
        ran = agree(function, [query, key], {0: 1, 1: 1}, size)
        assert (ran.cuts, ran.forward, ran.backward) == ((Layout(1, (12,)),), {}, {})
    shared = random(2, 1, 3, 4)
    assert agree(torch.matmul, [query, shared], {0: 1}, size).backward == {"sum": 1}
    assert agree(torch.matmul, [query, key], {0: 1}, size).backward == {"gather": 1}
    assert agree(torch.matmul, [random(5, 2), key.transpose(-2, -1)[..., :2, :]], {1: 1}, size).backward == {"sum": 1}


@pytest.mark.parametrize("size", SIZES)
def test_batches_whose_matrices_are_cut(size: int) -> None:
    left, right = random(2, 5, 12), random(2, 12, 4)
    ran = agree(torch.bmm, [left, right], {0: 2, 1: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"sum": 1}, {})
    assert agree(torch.bmm, [random(2, 12, 5), random(2, 5, 3)], {0: 1}, size).cuts == (Layout(1, (12,)),)
    assert agree(torch.bmm, [random(2, 3, 5), random(2, 5, 12)], {1: 2}, size).cuts == (Layout(2, (12,)),)


@pytest.mark.parametrize("size", SIZES)
def test_experts_in_one_tensor(size: int) -> None:
    def experts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(x.expand(4, 5, 6) * 1, up)), down)

    ran = agree(experts, [random(5, 6), random(4, 6, 12), random(4, 12, 6)], {1: 2, 2: 1}, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"sum": 1})


def test_vectors() -> None:
    assert agree(torch.matmul, [random(4), random(4)], {0: 0, 1: 0}, 2).forward == {"sum": 1}
    assert agree(torch.dot, [random(4), random(4)], {0: 0, 1: 0}, 2).forward == {"sum": 1}
    assert agree(torch.mv, [random(6, 4), random(4)], {0: 0}, 2).cuts == (Layout(0, (6,)),)
    assert agree(torch.matmul, [random(4), random(3, 4, 6)], {1: 2}, 2).cuts == (Layout(1, (6,)),)


@pytest.mark.parametrize("size", SIZES)
def test_baddbmm_with_factors(size: int) -> None:
    def scores(added: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.baddbmm(added, query, key, beta=0.5, alpha=2.0)

    tensors = [random(12, 1, 4), random(12, 5, 3), random(12, 3, 4)]
    ran = agree(scores, tensors, {1: 0, 2: 0}, size)
    assert (ran.cuts, ran.backward) == ((Layout(0, (12,)),), {"gather": 1})
    assert agree(scores, tensors, {0: 0, 1: 0, 2: 0}, size).backward == {}


@pytest.mark.parametrize("size", SIZES)
def test_einsum(size: int) -> None:
    query, key = random(2, 5, 12, 3), random(2, 4, 12, 3)
    ran = agree(lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), [query, key], {0: 2, 1: 2}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((Layout(1, (12,)),), {}, {})
    ran = agree(lambda x, w: torch.einsum("bth,hd->btd", x, w), [random(2, 3, 12), random(12, 5)], {0: 2, 1: 0}, size)
    assert (ran.cuts, ran.forward) == ((None,), {"sum": 1})
    assert agree(
        lambda x, w: torch.einsum("td,dh->th", x, w), [random(3, 5), random(5, 12)], {1: 1}, size
    ).backward == {"sum": 1}


@pytest.mark.parametrize(
    ("equation", "shapes", "cuts"),
    [
        ("ii->i", [(4, 4)], {0: 0}),
        ("...i,ij->...j", [(3, 4), (4, 2)], {0: 1}),
        ("ti,ij->tj", [(3, 4), (4, 2)], {0: 1}),
        ("ti,ij->tj", [(4, 4), (4, 2)], {0: 0, 1: 0}),
    ],
)
def test_einsum_of_other_forms_gathers(equation: str, shapes: list[tuple[int, ...]], cuts: dict[int, int]) -> None:
    tensors = [random(*shape) for shape in shapes]
    agree(lambda *operands: torch.einsum(equation, *operands), tensors, cuts, 2, gathers=["einsum"])


def test_what_has_no_form_gathers_and_is_exact() -> None:
    x, weight = random(2, 3, 8), random(4, 8)
    agree(F.linear, [x, weight], {0: 2}, 2, gathers=["linear"])
    agree(F.linear, [x, weight], {0: 2, 1: 0}, 2, gathers=["linear"])
    agree(F.linear, [x, weight], {0: Cut(dim=2, segments=(4, 4)), 1: 1}, 2, gathers=["linear"])
    agree(F.linear, [x, weight, random(4)], {1: 1, 2: 0}, 2, gathers=["linear"])
    agree(F.linear, [x, weight, random(4)], {2: 0}, 2, gathers=["linear"])
    agree(
        lambda b, a, w: torch.addmm(b, a, w, alpha=2),
        [random(4), random(3, 8), random(8, 4)],
        {2: 1},
        2,
        gathers=["addmm"],
    )
    agree(torch.matmul, [random(2, 4, 3, 6), random(2, 4, 6, 5)], {0: 1, 1: 2}, 2, gathers=["matmul"])
    agree(
        torch.matmul, [random(4, 4, 5), random(4, 5, 6)], {0: 0, 1: Cut(dim=0, segments=(2, 2))}, 2, gathers=["matmul"]
    )
    agree(F.bilinear, [random(3, 4), random(3, 4), random(2, 4, 4)], {0: 1}, 2, gathers=["bilinear"])


@pytest.mark.parametrize("size", SIZES)
def test_uneven_parts(size: int) -> None:
    def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, up, bias)), down)

    ran = agree(mlp, [random(2, 3, 5), random(7, 5), random(7), random(4, 7)], {1: 0, 2: 0, 3: 1}, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"sum": 1})
    assert agree(mlp, [random(3, 5), random(7, 5), random(7), random(4, 7)], {1: 0, 3: 1}, size).forward == {"sum": 1}


def test_autocast_keeps_the_type_of_a_product_with_a_bias() -> None:
    def rank(group: ThreadShardGroup) -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            x, weight = Shard(torch.ones(2, 4), 1, (8,), group), Shard(torch.ones(3, 4), 1, (8,), group)
            return F.linear(x, weight, torch.ones(3)).dtype

    assert run_threads(2, rank) == [torch.bfloat16, torch.bfloat16]
