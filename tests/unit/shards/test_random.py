"""Random numbers of shards: each rank's own, all of them from the generator that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardOptions
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.random import attention_with_dropout, default_generator, dropout_part, own_numbers, random_part
from lightning_3d.shards.threads import Meeting, ThreadShardGroup
from tests.unit.shards.agreement import random
from tests.unit.shards.threads import whole

RANKS = 3


def groups(exact: bool = False) -> list[ThreadShardGroup]:
    """Ranks that never meet: they run one after the other, each from the same seed."""
    meeting = Meeting(RANKS)
    return [ThreadShardGroup(meeting, rank, ShardOptions(exact_random=exact)) for rank in range(RANKS)]


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(5)
    return function(*args)


def cut(tensor: Tensor, dim: int, group: ThreadShardGroup) -> Shard:
    layout = Layout(dim, (tensor.shape[dim],))
    return Shard(layout.part(tensor, group.rank, group.size), dim, layout.segments, group)


def local(shard: Any) -> Tensor:
    assert isinstance(shard, Shard)
    return shard._local


def test_ranks_draw_other_numbers_and_leave_the_generator_alike() -> None:
    x = torch.ones(600, 6)
    masks, following = [], []
    for group in groups():
        masks.append(local(seeded(F.dropout, cut(x, 1, group), 0.25)))
        following.append(torch.rand(3))
    assert all(torch.equal(each, following[0]) for each in following)
    assert not torch.equal(following[0], seeded(torch.rand, 3))
    for index, mask in enumerate(masks):
        assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert abs((mask == 0).float().mean() - 0.25) < 0.05
        assert not any(torch.equal(mask, other) for other in masks[:index])


def test_two_draws_differ_and_a_seed_repeats_them() -> None:
    shard = cut(torch.ones(40, 6), 1, groups()[1])
    first, second = local(seeded(F.dropout, shard)), local(F.dropout(shard))
    assert not torch.equal(first, second)
    assert torch.equal(first, local(seeded(F.dropout, shard)))


def test_the_generator_is_put_back_after_an_error() -> None:
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(KeyError), own_numbers(torch.ones(1), groups()[0]):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), expected)


def test_every_accelerator_has_generators_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = torch.Generator(), torch.Generator()
    backend = SimpleNamespace(default_generators=generators, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    assert default_generator(torch.device("xpu", 0)) is generators[0]
    assert default_generator(torch.device("xpu")) is generators[1]
    assert default_generator(torch.device("meta")) is default_generator(torch.device("cpu")) is torch.default_generator


def test_fake_tensors_draw_nothing() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode():
        x = F.dropout(Shard(torch.ones(4, 2), 1, (6,), groups()[0]))
        assert x.shape == (4, 6)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_training_it_is_the_same_tensor() -> None:
    shard = cut(torch.ones(4, 6), 1, groups()[0])
    assert F.dropout(shard, 0.5, training=False) is shard
    assert F.dropout(shard, 0.0) is shard
    assert F.alpha_dropout(shard, 0.5) is shard


def test_in_place() -> None:
    shard = cut(torch.ones(40, 6) * 1, 1, groups()[0])
    own = shard._local
    assert F.dropout(shard, 0.5, inplace=True) is shard
    assert shard._local is own
    assert 0 < (own == 0).sum() < own.numel()
    assert torch.dropout_(shard, 0.5, True) is shard
    assert torch.dropout(shard, 0.5, False) is shard


@pytest.mark.parametrize("p", [0.25, 1.0])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_exact_masks_are_those_of_one_device(dim: int, order: tuple[int, ...], p: float) -> None:
    x = random(6, 12, 9).permute(order)
    expected = seeded(F.dropout, x, p)
    parts = [local(seeded(F.dropout, cut(x, dim, group), p)) for group in groups(exact=True)]
    assert torch.equal(whole(parts, dim), expected)
    following = torch.rand(3)
    seeded(F.dropout, x, p)
    assert torch.equal(following, torch.rand(3))


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.7}, {"attn_mask": random(5, 7)}, {"attn_mask": random(2, 1, 5, 7) > 0.8}],
)
def test_exact_attention_is_that_of_one_device(heads: int, options: dict[str, Any]) -> None:
    query, key, value = random(2, 6, 5, 4), random(2, heads, 7, 4), random(2, heads, 7, 4, seed=1)
    tensors = [each.requires_grad_() for each in (query, key, value)]

    def attention(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, dropout_p=0.3, enable_gqa=heads not in (1, 6), **options)

    expected = (
        seeded(attention, *tensors)
        if heads > 1
        else seeded(attention, query, *(each.expand(2, 6, 7, 4) for each in tensors[1:]))
    )
    parts = []
    for group in groups(exact=True):
        cuts = [cut(each, 1, group) if each.shape[1] == 6 else each for each in tensors]
        parts.append(local(seeded(attention, *cuts)))
    ours = whole(parts, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad(expected.square().sum(), query)[0]
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), query)[0], theirs, rtol=1e-12, atol=1e-12)


def block(group: ThreadShardGroup, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Dropout on parts, attention with dropout on parts, and dropout on what every rank has."""

    def forward(x: Tensor) -> Tensor:
        hidden = F.dropout(F.linear(x, Shard(weight, 0, (RANKS * len(weight),), group)), 0.3)
        heads = hidden.view(2, 5, 2 * RANKS, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)
        return x + F.dropout(local(out.transpose(1, 2).flatten(2)), 0.3)

    return forward


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_again(reentrant: bool, exact: bool) -> None:
    group = groups(exact)[1]
    # Nothing is exchanged: this rank's part of everything is what is compared.
    group.sum = lambda value: value.clone()  # type: ignore[method-assign]
    weights = [random(8, 8, seed=seed).requires_grad_() for seed in range(3)]

    def gradients(run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        torch.manual_seed(7)
        x = start = random(2, 5, 8).requires_grad_()
        for weight in weights:
            group.forget_copies()
            x = run(block(group, weight), x)
        group.forget_copies()
        found = torch.autograd.grad if not reentrant else None
        if found is not None:
            return found(x.square().sum(), (start, *weights)), torch.rand(3)
        for each in weights:
            each.grad = None
        x.square().sum().backward()
        return tuple(each.grad for each in (start, *weights) if each.grad is not None), torch.rand(3)

    expected, following = gradients(lambda function, x: function(x))
    ours, after = gradients(lambda function, x: checkpoint(function, x, use_reentrant=reentrant))
    assert len(ours) == len(expected) == 4
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(following, after)


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exact", [False, True])
def test_a_mode_sees_one_call(exact: bool) -> None:
    group = groups(exact)[0]
    x = torch.ones(1, 2, 3, 4)
    with Watch() as watch:
        dropout_part(x, group, 0.5, 1, (6,), (72, 12, 4, 1))
        attention_with_dropout(x, x, x, None, group, 1, (6,), 0.5, False, None, False)
        random_part(x, group, torch.rand_like)
    assert watch.calls == [dropout_part, attention_with_dropout, random_part]


@pytest.mark.parametrize("function", [torch.rand_like, torch.randn_like, torch.bernoulli])
def test_random_tensors_in_the_shape_of_a_shard(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.full((30, 6), 0.5, dtype=torch.float64)
    parts = [local(seeded(function, cut(x, 1, group))) for group in groups()]
    assert all(part.shape == (30, 2) and part.dtype == torch.float64 for part in parts)
    assert not torch.equal(parts[0], parts[1])
    options = {} if function is torch.bernoulli else {"dtype": torch.float32}
    assert function(cut(x, 1, groups()[0]), **options).dtype == options.get("dtype", torch.float64)


def test_alpha_dropout_keeps_the_mean() -> None:
    out = local(F.alpha_dropout(cut(random(900, 6), 1, groups()[0]), 0.5, training=True))
    assert abs(out.mean()) < 0.1
    assert len(out.unique()) < out.numel() * 0.6


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout2d(x, 0.5),
        lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
        lambda x: torch.rand_like(x),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.alpha_dropout(x, 0.5, training=True, inplace=True),
        lambda x: torch.bernoulli(x.clamp(0, 1)),
        lambda x: (x * 1).bernoulli_(0.5),
        lambda x: (x * 1).normal_(),
    ],
)
def test_exact_numbers_without_a_form_are_those_of_one_device(function: Callable[[Tensor], Tensor]) -> None:
    x = random(2, 6, 3, 4).sigmoid()
    expected = seeded(function, x.clone())
    meeting = groups(exact=True)
    for group in meeting:
        group.gather = lambda part, dim, segments: x.clone()  # type: ignore[method-assign]
        shard = cut(x.clone(), 1, group)
        result = seeded(function, shard)
        own = result._local if isinstance(result, Shard) else result
        theirs = expected if own.shape == expected.shape else expected.narrow(1, 2 * group.rank, 2)
        assert torch.equal(own, theirs)
