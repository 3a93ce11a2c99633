"""Elementwise operations on shards: every function that has a rule, every way to broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.rules import pointwise
from tests.unit.shards.operations import Operand, check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

Function = Callable[..., Any]
CUT = Layout(1, (6,))
PACKED = Layout(1, (2, 4))


def whole(*shape: int, kind: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = operand(*shape, seed=seed).whole
    return values if kind.is_floating_point or kind.is_complex else (values * 9).to(kind)


def candidates(second: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Arguments, one set of which at least every elementwise function takes."""
    x, y, z = whole(4, 6), whole(*second, seed=1), whole(*second, seed=2)
    integers = whole(4, 6, kind=torch.int64), whole(*second, kind=torch.int64, seed=1)
    mask = y > 0.5
    numbers = [(x,), (x, 1), (x, 0.5, 0.25), (torch.complex(x, x),), integers[:1]]
    return [*numbers, (x, y), (x, y, z), (x, mask, 0.5), (x, mask, z), integers]


def fits(function: Function, args: tuple[Any, ...], gradients: bool) -> bool:
    """Whether a function of whole tensors takes these arguments, and has a backward if it should."""
    own = [each.clone() if isinstance(each, Tensor) else each for each in args]
    own[0] = own[0].requires_grad_(gradients and own[0].is_floating_point()).clone()
    try:
        result = function(*own)
        if isinstance(result, Tensor) and result.requires_grad:
            result.real.sum().backward()
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    return isinstance(result, Tensor)


def try_on_shards(function: Function, args: tuple[Any, ...], cuts: list[Layout | None], gradients: bool) -> None:
    tensors = [each for each in args if isinstance(each, Tensor)]
    operands = [
        Operand(each, cut if cut and each.dim() == 2 and each.shape[1] == 6 else None)
        for each, cut in zip(tensors, cuts, strict=False)
    ]

    def operation(*given: Tensor) -> Any:
        # What is written to in place is no leaf.
        rest = iter((given[0].clone(), *given[1:]))
        return function(*(next(rest) if isinstance(each, Tensor) else each for each in args))

    check(operation, *operands, size=2, gradients=gradients)


FUNCTIONS = [
    function
    for function, _ in pointwise.table.items()
    # No values, no device, no tensor, no tensor first: tested below.
    if function.__name__ not in ("empty_like", "cuda", "type") and function is not torch.where
]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=[f"{index}-{each.__name__}" for index, each in enumerate(FUNCTIONS)]
)
def test_every_function(function: Function) -> None:
    taken = 0
    for second, cuts in (((4, 6), [PACKED] * 3), ((6,), [CUT, None, None])):
        for args in candidates(second):
            if fits(function, args, gradients=False):
                taken += 1
                try_on_shards(function, args, cuts, fits(function, args, gradients=True))
    assert taken, "no arguments fit"


BROADCASTS = [
    (operand(4, 6, cut=1), operand(4, 6, cut=1, seed=1)),
    (operand(4, 6, cut=1), operand(3, 4, 6, cut=2, seed=1)),
    (operand(4, 6, cut=0), operand(3, 4, 1, cut=1, seed=1)),
    (operand(4, 6, cut=1), operand(6, cut=0, seed=1)),
    (operand(4, 6, cut=1), operand(6, seed=1)),
    (operand(4, 6, cut=1), operand(1, seed=1)),
    (operand(4, 6, cut=1), operand(seed=1)),
    (operand(4, 6, cut=0), operand(6, seed=1)),
    (operand(4, 6, cut=0), operand(4, 1, seed=1)),
    (operand(4, 6, cut=1), operand(4, 1, seed=1)),
    (operand(4, 6, cut=1), operand(3, 4, 6, seed=1)),
    (operand(4, 1, cut=0), operand(4, 6, seed=1)),
    (operand(6, cut=0), operand(2, 3, 4, 6, seed=1)),
    (operand(4, 8, cut=1, segments=(4, 4)), operand(4, 8, seed=1)),
    (operand(4, 8, cut=1, segments=(2, 4, 2)), operand(8, cut=0, segments=(2, 4, 2), seed=1)),
]


@pytest.mark.parametrize("pair", BROADCASTS, ids=lambda pair: " ".join(str(tuple(each.whole.shape)) for each in pair))
@pytest.mark.parametrize("turned", [False, True])
def test_every_way_to_broadcast(pair: tuple[Operand, Operand], turned: bool) -> None:
    first, second = reversed(pair) if turned else pair
    check(lambda x, y: x * y - x / y, first, second, size=2)
    check(torch.hypot, first, second, size=2)
    check(lambda x, y: torch.where(x > 0.4, x, y), first, second, size=2)
    check(lambda x, y: torch.addcmul(x, x, y, value=2), first, second, size=2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_layouts(size: int) -> None:
    random = torch.Generator().manual_seed(size)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    for seed in range(20):
        shape = [draw(1, 4) for _ in range(draw(1, 5))]
        cut = draw(0, len(shape))
        segments = tuple(size * draw(1, 3) for _ in range(draw(1, 4)))
        shape[cut] = sum(segments)
        other = [length if draw(0, 2) else 1 for length in shape[draw(0, len(shape)) :]]
        x, y = operand(*shape, cut=cut, segments=segments), operand(*other, seed=seed)
        check(lambda x, y: (x + y) * F.gelu(x) - torch.maximum(x, y), x, y, size=size)


def test_where_by_name_and_for_positions() -> None:
    x, y = operand(4, 6, cut=1), operand(4, 6, seed=1)
    check(lambda x, y: torch.where(condition=x > 0.5, input=x, other=y), x, y, size=2)
    check(lambda x, y: torch.where(y > 0.5, x, other=0.0), x, y, size=2)
    check(lambda x: torch.where(x > 0.5)[1], x, size=2, on_shards=False)


def test_what_is_cut_differently_is_gathered() -> None:
    check(torch.mul, operand(4, 4, cut=0), operand(4, 4, cut=1, seed=1), size=2, on_shards=False)
    packed = operand(4, 8, cut=1, segments=(4, 4), seed=1)
    check(torch.mul, operand(4, 8, cut=1), packed, size=2, on_shards=False)


def test_in_place_on_a_replicated_tensor() -> None:
    check(lambda x, y: x.clone().mul_(y), operand(4, 6), operand(4, 6, cut=1, seed=1), size=2, on_shards=False)


def test_views_share_what_is_written() -> None:
    def operation(x: Tensor) -> Tensor:
        y = x * 1
        y.view(2, 2, 6).transpose(0, 1).mul_(3)
        y[1].add_(1)
        y += y.float().double().relu_()
        return y

    check(operation, operand(4, 6, cut=1), size=2)


def test_in_place_without_a_rule_writes_the_shard() -> None:
    def operation(x: Tensor) -> Tensor:
        y = x * 1
        view = y.view(2, 2, 6)
        assert y.index_add_(1, torch.tensor([0, 0]), torch.ones(4, 2, dtype=y.dtype)) is y
        torch.add(y, 1, out=y) if not y.requires_grad else None
        return view

    check(operation, operand(4, 6, cut=1), size=2, on_shards=False)


def test_out_and_inference_mode() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        with torch.inference_mode():
            whole = torch.arange(8.0)
            x = Shard(whole[group.rank * 4 :][:4].clone(), 0, (8,), group)
            y = x * 0
            assert torch.add(x, 1, out=y) is y
            assert torch.equal(y._local, x._local + 1)
            y.index_fill_(0, torch.tensor([7]), -1)
            assert torch.equal(y._local[-1] == -1, torch.tensor(group.rank == 1))

    run_threads(2, on_rank)


def test_types() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        x = Shard(torch.ones(2, 3), 0, (4,), group)
        assert x.to(torch.float32) is x
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to(x.double()).dtype == torch.float64
        assert torch.ones(1).to(x.double()).dtype == torch.float64
        assert x.type_as(torch.ones(1, dtype=torch.int8)).dtype == torch.int8
        assert torch.ones(1).type_as(x.half()).dtype == torch.float16
        assert x.type() == "torch.FloatTensor"
        assert x.type(torch.int64).shape == (4, 3)
        assert x.bfloat16().dtype == torch.bfloat16
        assert torch.empty_like(x).shape == (4, 3)
        assert not group._gathers

    run_threads(2, on_rank)


def test_comparing_with_what_is_no_tensor() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        x = Shard(torch.ones(2), 0, (4,), group)
        assert (x == None) is False  # noqa: E711
        assert (x != "text") is True
        with pytest.raises(TypeError):
            x < None  # noqa: B015

    run_threads(2, on_rank)


@pytest.mark.parametrize(("cut", "weight"), [(1, 6), (0, 6), (2, 1), (1, 1)])
def test_prelu(cut: int, weight: int) -> None:
    def operation(x: Tensor, weight: Tensor) -> Tensor:
        return F.prelu(x - 0.5, weight)

    check(operation, operand(2, 6, 4, cut=cut), operand(weight), size=2)


def test_prelu_with_its_weight_cut() -> None:
    def operation(x: Tensor, weight: Tensor) -> Tensor:
        return F.prelu(x - 0.5, weight)

    check(operation, operand(2, 6, 4, cut=1), operand(6, cut=0), size=2)
    check(operation, operand(2, 6, 4), operand(6, cut=0), size=2, on_shards=False)
    check(operation, operand(2, 6, 4, cut=0), operand(6, cut=0), size=2, on_shards=False)
