"""Attention whose heads are cut: masks, shared keys, and what torch's own modules ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.threads import ThreadShardGroup, run_threads
from tests.unit.shards.agreement import Cut, agree, random
from tests.unit.shards.rules.modules import Leaves

SIZES = (2, 3, 4)
HEADS = Layout(1, (12,))


def boolean(*shape: int) -> Tensor:
    mask = random(*shape) > 0
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("mask", "cut", "gathers"),
    [
        (None, False, 0),
        (random(5, 7), False, 0),
        (boolean(5, 7), False, 0),
        (boolean(2, 1, 5, 7), False, 0),
        (random(12, 5, 7), False, 1),
        (random(2, 12, 5, 7), False, 1),
        (random(1, 12, 5, 7), True, 0),
        (boolean(2, 12, 5, 7), False, 0),
    ],
)
def test_masks(size: int, mask: Tensor | None, cut: bool, gathers: int) -> None:
    tensors = [random(2, 12, 5, 4), random(2, 12, 7, 4), random(2, 12, 7, 6), *([] if mask is None else [mask])]
    ran = agree(F.scaled_dot_product_attention, tensors, {0: 1, 1: 1, 2: 1, **({3: 1} if cut else {})}, size)
    assert (ran.cuts, ran.forward) == ((HEADS,), {})
    broadcast = mask is not None and mask.is_floating_point() and mask.dim() == 2
    assert ran.backward == {**({"gather": gathers} if gathers else {}), **({"sum": 1} if broadcast else {})}


@pytest.mark.parametrize("size", SIZES)
def test_causal_scaled_and_three_dims(size: int) -> None:
    tensors = [random(2, 12, 5, 4, seed=seed) for seed in range(3)]
    for options in ({"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 2.0}):
        agree(
            lambda *qkv, options=options: F.scaled_dot_product_attention(*qkv, **options),
            tensors,
            dict.fromkeys(range(3), 1),
            size,
        )
    ran = agree(F.scaled_dot_product_attention, [each[0] for each in tensors], dict.fromkeys(range(3), 0), size)
    assert ran.cuts == (Layout(0, (12,)),)
    ran = agree(
        F.scaled_dot_product_attention, [each.transpose(0, 1) for each in tensors], dict.fromkeys(range(3), 0), size
    )
    assert ran.cuts == (Layout(0, (12,)),)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [1, 2, 3, 4, 6])
def test_keys_that_are_shared_and_whole(size: int, shared: int) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    tensors = [random(2, 12, 5, 4), random(2, shared, 7, 4), random(2, shared, 7, 4, seed=1)]
    ran = agree(attention, tensors, {0: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((HEADS,), {}, {"sum": 2})
    if shared % size == 0:
        assert agree(attention, tensors, {0: 1, 1: 1, 2: 1}, size).backward == {}


@pytest.mark.parametrize("size", SIZES)
def test_whole_keys_of_every_head_are_cut(size: int) -> None:
    tensors = [random(2, 12, 5, 4), random(2, 12, 7, 4), random(2, 12, 7, 4, seed=1)]
    assert agree(F.scaled_dot_product_attention, tensors, {0: 1}, size).backward == {"gather": 2}
    assert agree(F.scaled_dot_product_attention, tensors, {1: 1, 2: 1}, size).backward == {"gather": 1}


def test_what_has_no_form_gathers_and_is_exact() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    name = ["scaled_dot_product_attention"]
    tensors = [random(2, 4, 6, 4), random(2, 2, 6, 4), random(2, 2, 6, 4, seed=1)]
    agree(attention, tensors, {0: 2, 1: 2, 2: 2}, 2, gathers=name)
    agree(attention, tensors, {0: 3}, 2, gathers=name)
    agree(attention, tensors, {1: 1, 2: 1}, 2, gathers=name)
    agree(attention, tensors, {0: Cut(dim=1, segments=(2, 2))}, 2, gathers=name)
    agree(attention, [random(1, 6, 5, 4), random(1, 3, 5, 4), random(1, 3, 5, 4, seed=1)], {0: 1}, 4, gathers=name)


def multi_head(embed: int, heads: int, weights: Mapping[str, Any], **options: Any) -> Callable[..., Any]:
    """What `torch.nn.MultiheadAttention` calls; ``weights`` says which tensors are which arguments."""

    def call(*tensors: Tensor) -> Any:
        named = {name: tensors[index] for name, index in weights.items()}
        query, key, value = (named.pop(name) for name in ("query", "key", "value"))
        in_weight, in_bias = named.pop("in_weight", None), named.pop("in_bias", None)
        out_weight, out_bias = named.pop("out_weight"), named.pop("out_bias", None)
        return F.multi_head_attention_forward(
            query, key, value, embed, heads, in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias,
            use_separate_proj_weight="q_proj_weight" in named, **named, **options,
        )  # fmt: skip

    return call


EMBED, PACKED = 24, Cut(dim=0, segments=(24, 24, 24))
QUERY, MEMORY = random(5, 2, EMBED), random(7, 2, EMBED)
WEIGHTS = [random(3 * EMBED, EMBED), random(3 * EMBED), random(EMBED, EMBED), random(EMBED)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
        {"need_weights": False, "attn_mask": random(5, 5), "is_causal": True},
        {"need_weights": True, "attn_mask": ~boolean(5, 5), "is_causal": True},
        {"need_weights": False, "attn_mask": random(24, 5, 5)},
        {"need_weights": False, "key_padding_mask": ~boolean(2, 5)},
        {"need_weights": True, "attn_mask": random(5, 5), "key_padding_mask": random(2, 5), "is_causal": True},
    ],
)
def test_self_attention_of_torch(size: int, options: dict[str, Any]) -> None:
    def attention(x: Tensor, *weights: Tensor) -> Any:
        hidden = x * 2
        names = {"query": 0, "key": 0, "value": 0, "in_weight": 1, "in_bias": 2, "out_weight": 3, "out_bias": 4}
        return multi_head(EMBED, 12, names, **options)(hidden, *weights)

    ran = agree(attention, [QUERY, *WEIGHTS], {1: PACKED, 2: PACKED, 3: 1}, size)
    averaged = options["need_weights"] and options.get("average_attn_weights", True)
    assert (ran.forward, ran.backward) == ({"sum": 1 + averaged}, {"sum": 1})


@pytest.mark.parametrize("size", SIZES)
def test_attention_of_torch_to_a_memory(size: int) -> None:
    names = {"query": 0, "key": 1, "value": 1, "in_weight": 2, "in_bias": 3, "out_weight": 4, "out_bias": 5}

    def attention(query: Tensor, memory: Tensor, *weights: Tensor) -> Any:
        return multi_head(EMBED, 12, names, need_weights=False)(query * 2, memory * 2, *weights)

    ran = agree(attention, [QUERY, MEMORY, *WEIGHTS], {2: PACKED, 3: PACKED, 4: 1}, size)
    assert (ran.forward, ran.backward) == ({"sum": 1}, {"sum": 2})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_separate_weights_and_no_batch(size: int, bias: bool) -> None:
    tensors = [
        QUERY[:, 0],
        random(7, 10),
        random(7, 9),
        *(random(EMBED, width) for width in (EMBED, 10, 9)),
        WEIGHTS[2],
    ]
    names = {
        "query": 0,
        "key": 1,
        "value": 2,
        "q_proj_weight": 3,
        "k_proj_weight": 4,
        "v_proj_weight": 5,
        "out_weight": 6,
    }
    cuts: dict[int, Cut | int] = {3: 0, 4: 0, 5: 0, 6: 1}
    if bias:
        tensors, names, cuts = [*tensors, WEIGHTS[1]], {**names, "in_bias": 7}, {**cuts, 7: PACKED}
    ran = agree(multi_head(EMBED, 12, names, need_weights=True), tensors, cuts, size)
    assert (ran.forward, ran.backward) == ({"sum": 2}, {"sum": 3})


def test_torch_attention_without_a_form_gathers() -> None:
    names = {"query": 0, "key": 0, "value": 0, "in_weight": 1, "in_bias": 2, "out_weight": 3, "out_bias": 4}
    for options, cuts in (
        ({"static_k": random(24, 5, 2), "static_v": random(24, 5, 2)}, {1: PACKED, 3: 1}),
        ({}, {3: 1}),
    ):
        attention = multi_head(EMBED, 12, names, need_weights=False, **options)
        agree(attention, [QUERY, *WEIGHTS], cuts, 2, gathers=["multi_head_attention_forward"])


def cut_by_name(name: str) -> Cut | int | None:
    if "in_proj" in name:
        return PACKED
    rows = {"out_proj.weight": 1, "linear2.weight": 1, "linear1.weight": 0, "linear1.bias": 0}
    return next((dim for end, dim in rows.items() if name.endswith(end)), None)


def build(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(EMBED, 12, 36, 0.0, dtype=torch.float64, **options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "norm_first": True}])
@pytest.mark.parametrize(
    ("kind", "inputs"), [(nn.TransformerEncoderLayer, (QUERY,)), (nn.TransformerDecoderLayer, (QUERY, MEMORY))]
)
def test_layers_of_torch(size: int, options: dict[str, Any], kind: type[nn.Module], inputs: tuple[Tensor, ...]) -> None:
    named = dict(build(kind, **options).named_parameters())
    count = len(inputs)
    if options:
        inputs = tuple(each.transpose(0, 1).contiguous() for each in inputs)
    cuts = {count + index: cut_by_name(name) for index, name in enumerate(named)}

    def layer(*tensors: Tensor) -> Tensor:
        own = tuple(each * 2 for each in tensors[:count])
        result: Tensor = Leaves(build(kind, **options))(own, tensors[count:])
        return result

    ran = agree(layer, [*inputs, *named.values()], {at: cut for at, cut in cuts.items() if cut is not None}, size)
    sums = 2 if count == 1 else 3
    assert (ran.forward, ran.backward) == ({"sum": sums}, {"sum": sums + (count > 1)})


def test_the_fast_path_of_torch_is_not_taken() -> None:
    layer = build(nn.TransformerEncoderLayer, batch_first=True).eval()
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = QUERY.transpose(0, 1).contiguous()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
    named = dict(encoder.named_parameters())

    def rank(group: ThreadShardGroup) -> Tensor:
        own: list[Tensor] = []
        for name, value in named.items():
            cut = cut_by_name(name)
            layout = (
                None
                if cut is None
                else Layout(
                    cut if isinstance(cut, int) else 0, (value.shape[cut],) if isinstance(cut, int) else (24,) * 3
                )
            )
            own.append(
                value
                if layout is None
                else Shard(layout.part(value.detach(), group.rank, 2), layout.dim, layout.segments, group)
            )
        fresh = nn.TransformerEncoder(build(nn.TransformerEncoderLayer, batch_first=True), 1).eval()
        with torch.no_grad():
            result: Tensor = Leaves(fresh)((x,), tuple(own), src_key_padding_mask=padding)
        assert not group._gathers
        return result

    for result in run_threads(2, rank):
        # The fast path leaves zeros where there is padding.
        torch.testing.assert_close(result[:, :3], expected[:, :3], rtol=1e-12, atol=1e-12)
