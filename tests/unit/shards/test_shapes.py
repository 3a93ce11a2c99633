"""Views of shards: the dim that is cut is found again, with its segments, or more segments are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_3d.errors import ModuleError
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.refusal import NeedsSegments, Unshardable
from lightning_3d.shards.rules.shapes import view_plan
from tests.unit.shards.operations import check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

Function = Callable[..., Any]


@pytest.mark.parametrize(
    ("shape", "dim", "segments", "target", "expected"),
    [
        # Features to heads, and back.
        ((2, 5, 16), 2, (16,), (2, 5, 4, 4), (2, (4,))),
        ((2, 5, 4, 4), 2, (4,), (2, 5, 16), (2, (16,))),
        ((2, 5, 4, 4), 2, (4,), (2, 5, -1), (2, (16,))),
        # Packed q, k and v, equal and not.
        ((2, 5, 48), 2, (16, 16, 16), (2, 5, 3, 4, 4), (3, (4,))),
        ((2, 5, 48), 2, (16, 16, 16), (2, 5, 12, 4), (2, (4, 4, 4))),
        ((2, 5, 32), 2, (16, 8, 8), (2, 5, 8, 4), (2, (4, 2, 2))),
        ((10, 48), 1, (16, 16, 16), (2, 5, 3, 16), (3, (16,))),
        ((2, 5, 3, 16), 3, (16,), (2, 5, 48), (2, (16, 16, 16))),
        # Heads that hold their q, k and v each.
        ((2, 5, 48), 2, (48,), (2, 5, 4, 3, 4), (2, (4,))),
        # Rows before the dim, or after.
        ((2, 5, 16), 2, (16,), (10, 16), (1, (16,))),
        ((16, 2, 5), 0, (16,), (16, 10), (0, (16,))),
        ((16, 2, 5), 0, (16,), (160,), (0, (160,))),
        ((16, 2, 5), 0, (16,), (4, 4, 10), (0, (4,))),
        # Batch and heads as one dim, and apart again.
        ((3, 4, 5, 2), 1, (4,), (12, 5, 2), (0, (4, 4, 4))),
        ((12, 5, 2), 0, (4, 4, 4), (3, 4, 5, 2), (1, (4,))),
        ((12, 5, 2), 0, (4, 4, 4), (12, 10), (0, (4, 4, 4))),
        # Lengths of one.
        ((1, 16), 1, (16,), (1, 1, 16, 1), (2, (16,))),
        ((2, 1, 16, 1), 2, (16,), (2, 16), (1, (16,))),
    ],
)
def test_the_dim_is_found_again(shape: Any, dim: int, segments: Any, target: Any, expected: Any) -> None:
    local = [length // 2 if each == dim else length for each, length in enumerate(shape)]
    assert view_plan(tuple(local), dim, segments, 2, target)[1:] == expected
    check(lambda x: x.reshape(target), operand(*shape, cut=dim, segments=segments), size=2)


@pytest.mark.parametrize(
    ("shape", "dim", "segments", "target", "needed"),
    [
        ((2, 5, 24), 2, (24,), (2, 5, 3, 2, 4), (8, 8, 8)),
        ((2, 5, 24), 2, (24,), (2, 5, 3, 8), (8, 8, 8)),
        ((10, 32), 1, (16, 16), (10, 1, 32), None),
        ((2, 5, 6), 2, (6,), (2, 5, 3, 2), (2, 2, 2)),
        ((2, 5, 6), 2, (6,), (60,), None),
    ],
)
def test_segments_that_it_needs(shape: Any, dim: int, segments: Any, target: Any, needed: Any) -> None:
    local = tuple(length // 2 if each == dim else length for each, length in enumerate(shape))
    if needed is None:
        check(lambda x: x.reshape(target), operand(*shape, cut=dim, segments=segments), size=2)
        return
    with pytest.raises(NeedsSegments) as refusal:
        view_plan(local, dim, segments, 2, target)
    assert refusal.value.segments == needed
    check(lambda x: x.reshape(target), operand(*shape, cut=dim, segments=segments), size=2, on_shards=False)
    check(lambda x: x.reshape(target), operand(*shape, cut=dim, segments=needed), size=2)


@pytest.mark.parametrize("target", [(3, 3), (-1, -1), (5, -1), (0, -1)])
def test_wrong_lengths_are_refused_and_torch_complains(target: tuple[int, ...]) -> None:
    with pytest.raises(Unshardable):
        view_plan((2, 2), 0, (4,), 2, target)

    def on_rank(group: ThreadShardGroup) -> None:
        with pytest.raises(RuntimeError):
            Shard(torch.ones(2, 2), 0, (4,), group).view(target)

    run_threads(2, on_rank)


def test_many_segments_are_refused() -> None:
    with pytest.raises(Unshardable, match="too many segments"):
        view_plan((2000, 2), 1, (4,), 2, (-1,))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_views(size: int) -> None:
    random = torch.Generator().manual_seed(size)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    exact = 0
    for _ in range(80):
        shape = [draw(1, 5) for _ in range(draw(1, 5))]
        cut = draw(0, len(shape))
        segments = tuple(size * draw(1, 4) for _ in range(draw(1, 4)))
        shape[cut] = sum(segments)
        rest, target = math.prod(shape), []
        while rest > 1 and len(target) < 4:
            divisors = [each for each in range(1, rest + 1) if rest % each == 0]
            target.append(divisors[draw(0, len(divisors))])
            rest //= target[-1]
        target.insert(draw(0, len(target) + 1), rest)
        try:
            view_plan(
                tuple(x // size if d == cut else x for d, x in enumerate(shape)), cut, segments, size, tuple(target)
            )
            exact += 1
        except Unshardable:
            pass
        given = tuple(target)
        check(
            lambda x, given=given: x.reshape(given),
            operand(*shape, cut=cut, segments=segments),
            size=size,
            on_shards=None,
        )
    assert exact > 10


SHAPE = (2, 4, 1, 8)
FUNCTIONS: dict[str, Function] = {
    "view": lambda x: x.view(2, 4, -1),
    "view of a tuple": lambda x: x.view((8, 1, 8)),
    "view by name": lambda x: x.view(size=(2, 4, 8)),
    "view as a type": lambda x: x.view(torch.int64).view(torch.float64) * 2,
    "reshape": lambda x: torch.reshape(x, (2, 4, 1, 8, 1)),
    "reshape by name": lambda x: x.reshape(shape=[2, 4, 1, 8]),
    "view_as": lambda x: x.view_as(torch.empty(8, 1, 8)),
    "view_as a shard": lambda x: (torch.ones(64, dtype=x.dtype).view_as(x) * x).reshape_as(x),
    "flatten": lambda x: x.flatten(1, 2),
    "flatten all": lambda x: torch.flatten(x),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(-1, (4, -1)),
    "unflatten torch": lambda x: torch.unflatten(x, 1, (2, 2)),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose by name": lambda x: torch.transpose(x, dim0=0, dim1=3),
    "swapaxes": lambda x: x.swapaxes(axis0=0, axis1=1),
    "swapdims": lambda x: torch.swapdims(x, 0, 1),
    "t": lambda x: x.flatten(0, 2).t(),
    "permute": lambda x: x.permute(3, 1, 2, 0),
    "permute of a list": lambda x: torch.permute(x, [-1, 0, 1, 2]),
    "permute by name": lambda x: x.permute(dims=(1, 0, 2, 3)),
    "movedim": lambda x: x.movedim(1, -1),
    "movedim of several": lambda x: torch.movedim(x, (0, 1), (3, 0)),
    "moveaxis": lambda x: x.moveaxis(3, 0),
    "T": lambda x: x.flatten(0, 2).T,
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "H": lambda x: x.flatten(0, 2).H,
    "adjoint": lambda x: x.adjoint(),
    "squeeze": lambda x: x.squeeze(),
    "squeeze of one": lambda x: x.squeeze(2),
    "squeeze of several": lambda x: torch.squeeze(x, (2, 3)),
    "squeeze of none": lambda x: x.squeeze(-1),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1).unsqueeze(dim=2),
    "expand": lambda x: x.expand(3, -1, 4, 5, 8),
    "expand of a list": lambda x: x.expand([2, 4, 3, 8]),
    "expand_as": lambda x: x.expand_as(torch.empty(2, 4, 5, 8)),
    "expand_as a shard": lambda x: torch.ones(8, dtype=x.dtype).expand_as(x) * x,
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 6, 8)),
    "repeat": lambda x: x.repeat(2, 1, 3, 2, 2),
    "repeat of a tuple": lambda x: x.repeat((1, 2, 3, 1)),
    "tile": lambda x: x.tile(2, 3),
    "tile torch": lambda x: torch.tile(x, (2,)),
    "contiguous": lambda x: x.transpose(0, 3).contiguous(),
    "contiguous as it is": lambda x: x.contiguous() * 2,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "pairs": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(3, (-1, 2))) * 1j).flatten(-2),
    "unfold": lambda x: x.unfold(2, 1, 1),
    "diagonal": lambda x: x.diagonal(0, 1, 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("cut", "segments"), [(0, (2,)), (1, (4,)), (1, (2, 2)), (3, (8,)), (3, (2, 6)), (3, (2, 4, 2))]
)
def test_every_function(name: str, cut: int, segments: tuple[int, ...]) -> None:
    check(FUNCTIONS[name], operand(*SHAPE, cut=cut, segments=segments), size=2, on_shards=None)


@pytest.mark.parametrize(
    "name",
    sorted(
        set(FUNCTIONS) - {"view as a type", "t", "H", "T", "diagonal", "pairs", "flatten all", "ravel", "unflatten"}
    ),
)
def test_rules_spare_the_gather(name: str) -> None:
    check(FUNCTIONS[name], operand(*SHAPE, cut=1), size=2)


@pytest.mark.parametrize("name", ["t", "T", "H", "flatten all", "ravel", "view as a type", "unflatten"])
def test_rules_spare_the_gather_of_the_first_dim(name: str) -> None:
    check(FUNCTIONS[name], operand(*SHAPE, cut=0), size=2)


def test_all_dims_backwards() -> None:
    check(lambda x: x.T, operand(4, 6, cut=0), size=2)
    check(lambda x: x.t(), operand(6, cut=0), size=2)
    check(lambda x: torch.view_as_complex(x) * 1j, operand(4, 2, cut=0), size=2)
    check(lambda x: x.diagonal(1, 0, 2), operand(4, 6, 5, cut=1), size=2)


def test_shape_in_place() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        with pytest.raises(ModuleError, match=r"squeeze_ at .*test_shapes\.py:\d+ changes shape"):
            Shard(torch.ones(2, 1), 0, (4,), group).squeeze_()

    run_threads(2, on_rank)
