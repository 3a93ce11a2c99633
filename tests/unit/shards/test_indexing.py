"""Elements of shards by position: the same as of the whole; slices of packed dims; what asks for other segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.errors import ModuleError
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.refusal import NeedsSegments, Unshardable
from lightning_3d.shards.rules import RULES
from lightning_3d.shards.rules.indexing import span
from tests.unit.shards.operations import Operand, check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

Function = Callable[..., Any]
FULL = slice(None)
WHERE = torch.tensor([[2, 0], [1, 2], [0, 0]])
MASK = torch.tensor([[True, False, True], [False, True, True]])

# Of a tensor of (2, 3, 8, 3) whose dim 2 is cut.
INDICES: dict[str, Any] = {
    "a number": 1,
    "from the end": -1,
    "numbers": (0, 2),
    "a number behind": (..., 1),
    "a slice": slice(0, 1),
    "all": FULL,
    "rest": ...,
    "new dims": (None, FULL, None),
    "new dims behind": (..., None),
    "around the cut": (FULL, None, FULL, None, FULL, None),
    "backwards refused by torch too": (slice(0, 2), slice(None, -1), FULL, slice(None, None, 2)),
    "a tensor": (FULL, WHERE),
    "a tensor first": torch.tensor([1, 1, 0]),
    "a tensor behind": (..., WHERE),
    "a list": [1, 0, 1],
    "a list behind": (..., [0, 2]),
    "a list of lists": (FULL, [[0, 1], [2, 0]]),
    "a mask": torch.tensor([True, False]),
    "a mask of two dims": MASK,
    "a list mask": (FULL, [True, False, True]),
    "two tensors together": (torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])),
    "two tensors that broadcast": (torch.tensor([[0], [1]]), torch.tensor([2, 0, 1])),
    "two tensors apart": (torch.tensor([0, 1, 1]), FULL, FULL, torch.tensor([2, 0, 1])),
    "a tensor and a number apart": (0, FULL, FULL, torch.tensor([2, 0])),
    "a number between tensors": (torch.tensor([0, 1]), 0, FULL, torch.tensor([2, 0])),
    "a new dim between tensors": (torch.tensor([0, 1]), None, torch.tensor([2, 0])),
    "a tensor and a slice": (slice(1, 2), torch.tensor([2, 0]), FULL, slice(0, 2)),
    "a mask and a number": (MASK, FULL, 1),
    "every second": (..., slice(None, None, 2), FULL),
    "every other second": (..., slice(1, None, 2), FULL),
}


@pytest.mark.parametrize("key", INDICES)
@pytest.mark.parametrize("segments", [(8,), (4, 4)])
def test_an_index_that_leaves_the_cut_dim(key: str, segments: tuple[int, ...]) -> None:
    index = INDICES[key]
    check(lambda x: x[index], operand(2, 3, 8, 3, cut=2, segments=segments), size=2)


@pytest.mark.parametrize("key", INDICES)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_an_index_anywhere(key: str, cut: int) -> None:
    index = INDICES[key]
    x = operand(4, 6, 8, 6, cut=cut)
    if key in ("a mask", "a mask of two dims", "a mask and a number"):
        x = operand(2, 3, 8, 4, cut=3 if cut == 3 else 2)
    if key == "a list mask":
        x = operand(4, 3, 8, 6, cut=0 if cut == 1 else cut)
    check(lambda x: x[index], x, size=2, on_shards=None)


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor(1),
        (FULL, torch.tensor(-1)),
        (torch.tensor(0), FULL, FULL, torch.tensor([2, 0])),
        True,
        (FULL, FULL, 5),
        (FULL, FULL, torch.tensor([5, 0])),
        (FULL, FULL, slice(1, 3)),
        (FULL, FULL, slice(0, 0)),
        (FULL, FULL, slice(0, 6, 2)),
        torch.ones(2, 3, 8, dtype=torch.bool),
    ],
    ids=str,
)
def test_an_index_of_the_cut_dim_gathers(index: Any) -> None:
    check(lambda x: x[index], operand(2, 3, 8, 3, cut=2), size=2, on_shards=False)


def test_an_index_that_is_cut() -> None:
    positions = Operand(torch.tensor([0, 2, 1, 1]), operand(4, cut=0).cut)
    check(lambda x, i: x[i], operand(4, 6), positions, size=2, on_shards=False)
    check(lambda x, i: x[:, i], operand(4, 6, cut=0), positions, size=2, on_shards=False)
    check(lambda x, i: x[i > 0], operand(4, 6, cut=1), positions, size=2, on_shards=False)


@pytest.mark.parametrize(
    ("start", "stop", "local", "segments"),
    [
        (None, 4, slice(0, 2), (4,)),
        (4, 8, slice(2, 4), (4,)),
        (4, None, slice(2, 8), (4, 8)),
        (-8, 16, slice(4, 8), (8,)),
        (0, 16, slice(0, 8), (4, 4, 8)),
    ],
)
def test_a_slice_of_whole_segments(start: Any, stop: Any, local: slice, segments: tuple[int, ...]) -> None:
    taken = span((4, 4, 8), 2, start, stop, None)
    assert (taken.local, taken.segments) == (local, segments)
    check(lambda x: x[:, start:stop], operand(3, 16, cut=1, segments=(4, 4, 8)), size=2)


def test_a_slice_asks_for_segments() -> None:
    with pytest.raises(NeedsSegments) as refusal:
        span((16,), 2, 4, 8, None)
    assert refusal.value.segments == (4, 4, 8)
    with pytest.raises(NeedsSegments) as refusal:
        span((8, 8), 2, 4, None, None)
    assert refusal.value.segments == (4, 4, 8)
    assert str(refusal.value) == "positions 4 to 16 of 16 needs the segments 4|4|8"
    with pytest.raises(Unshardable):
        span((6,), 2, None, None, 2)


def refusal(function: Function, *args: Any, group: ThreadShardGroup) -> Unshardable:
    with pytest.raises(Unshardable) as refused:
        RULES[function](Shard(torch.ones(3, 8), 1, (16,), group), *args)
    return refused.value


def test_pieces_and_positions_ask_for_segments() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        for function, args, segments in (
            (torch.split, ([4, 12], 1), (4, 12)),
            (torch.chunk, (2, -1), (8, 8)),
            (Tensor.tensor_split, ([4, 8], 1), (4, 4, 8)),
            (Tensor.unbind, (1,), (1,) * 16),
            (Tensor.select, (1, 3), (1,) * 16),
            (Tensor.__getitem__, ((FULL, 3),), (1,) * 16),
            (Tensor.narrow, (1, 4, 4), (4, 4, 8)),
        ):
            refused = refusal(function, *args, group=group)
            assert isinstance(refused, NeedsSegments)
            assert refused.segments == segments
        many = Shard(torch.ones(3, 32), 1, (64,), group)
        with pytest.raises(Unshardable) as refused_many:
            RULES[Tensor.select](many, 1, 0)
        assert not isinstance(refused_many.value, NeedsSegments)

    run_threads(2, on_rank)


PIECES: dict[str, Function] = {
    "split": lambda x: x.split(8, 2),
    "split torch": lambda x: torch.split(x, [8, 4, 12], dim=-1),
    "split_with_sizes": lambda x: x.split_with_sizes((12, 12), 2),
    "split elsewhere": lambda x: x.split(2, 1),
    "chunk": lambda x: x.chunk(2, -1),
    "chunk elsewhere": lambda x: torch.chunk(x, 2, dim=1),
    "tensor_split": lambda x: x.tensor_split((8, -12), 2),
    "tensor_split in equal": lambda x: torch.tensor_split(x, 2, dim=2),
    "tensor_split elsewhere": lambda x: x.tensor_split(2, 1),
    "unbind": lambda x: x.unbind(),
    "unbind elsewhere": lambda x: torch.unbind(x, dim=1),
    "iteration": lambda x: [each * 2 for each in x],
    "select": lambda x: x.select(1, -1),
    "narrow": lambda x: x.narrow(2, 8, 4),
    "narrow from the end": lambda x: torch.narrow(x, 2, torch.tensor(-12), 12),
    "narrow elsewhere": lambda x: x.narrow(1, 1, 2),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    check(PIECES[name], operand(2, 3, 24, cut=2, segments=(8, 4, 4, 8)), size=2)
    check(PIECES[name], operand(4, 6, 24, cut=0), size=2, on_shards=None)
    check(PIECES[name], operand(4, 6, 24, cut=1), size=2, on_shards=None)
    check(PIECES[name], operand(2, 3, 24, cut=2), size=2, on_shards=None)


def test_pieces_that_do_not_fit_gather() -> None:
    check(lambda x: x.split([3, 5], 0), operand(8, 2, cut=0), size=2, on_shards=False)
    check(lambda x: x.tensor_split(torch.tensor([1, 3])), operand(8, 2, cut=0), size=2, on_shards=False)
    check(lambda x: x.tensor_split((5, 3)), operand(8, 2, cut=0), size=2, on_shards=False)
    check(lambda x: x.index_select(0, torch.tensor([5, 1])), operand(8, 2, cut=0), size=2, on_shards=False)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, operand()),
        (0, operand(4)),
        ((..., 1), operand(3, 8, cut=1, segments=(4, 4))),
        ((..., 1), operand(3, 8)),
        ((..., 1), operand(3, 1)),
        ((FULL, [0, 2]), operand(2, 8, 4, cut=1, segments=(4, 4))),
        ((FULL, [0, 2]), operand(8, 1)),
        ((FULL, FULL, slice(None, None, 2)), operand(4, 4, cut=0, segments=(2, 2))),
        ((torch.tensor([0, 1]), FULL, FULL, torch.tensor([1, 3])), operand(2, 3, 8, cut=2, segments=(4, 4))),
        ((FULL, FULL, slice(4, 8)), operand(4, 4, cut=0)),
    ],
    ids=lambda each: str(tuple(each.whole.shape) if isinstance(each, Operand) else each),
)
def test_writing(index: Any, value: Operand) -> None:
    def operation(x: Tensor, value: Tensor) -> Tensor:
        y = x * 1
        view = y.view(2, 3, 8, 4)
        view[index] = value
        view[index] = 0.25
        view[index] += value
        return y

    check(operation, operand(2, 3, 8, 4, cut=2, segments=(4, 4)), value, size=2)


@pytest.mark.parametrize("index", [(FULL, FULL, slice(1, 3)), (FULL, FULL, 0), (FULL, FULL, [0, 3]), True], ids=str)
def test_writing_across_the_ranks(index: Any) -> None:
    def operation(x: Tensor, value: Tensor) -> Tensor:
        y = x * 1
        view = y.view(2, 3, 8, 4)
        view[index] = value
        return y

    check(operation, operand(2, 3, 8, 4, cut=2), operand(4), size=2, on_shards=False)


def test_writing_with_a_mask() -> None:
    def operation(x: Tensor, value: Tensor) -> Tensor:
        y = x * 1
        y[y > 0.5] = 0
        y[x < 0.3] = value
        y[torch.arange(24).view(3, 8) % 5 == 0] = -1.0
        y[torch.tensor([True, False, True])] *= 2
        return y

    check(operation, operand(3, 8, cut=1), operand(), size=2)
    check(lambda x, value: _masked(x, value), operand(3, 8, cut=1), operand(1), size=2, on_shards=False)


def _masked(x: Tensor, value: Tensor) -> Tensor:
    y = x * 1
    y[y > 0.5] = value
    return y


def test_writing_a_shard_to_a_replicated_tensor() -> None:
    def operation(x: Tensor, value: Tensor) -> Tensor:
        y = x * 1
        y[1:] = value
        return y

    check(operation, operand(3, 8), operand(8, cut=0), size=2, on_shards=False)


def test_gather_and_take_along_dim() -> None:
    labels = torch.tensor([[5, 0], [7, 2], [1, 1]])
    full = torch.tensor([[2, 0, 1, 1, 0, 2, 2, 2]])
    x = operand(3, 8, cut=1)

    def over_classes(x: Tensor) -> Any:
        return x.gather(1, labels), x.take_along_dim(labels, 1), x * 1

    check(over_classes, x, size=2)
    check(lambda x: torch.gather(x, 0, full), operand(3, 8, cut=1, segments=(4, 4)), size=2)
    check(lambda x: torch.take_along_dim(x, full[:, :1], 0), x, size=2)
    check(lambda x, y: x.gather(0, (y * 2).long()), x, operand(2, 8, cut=1), size=2)
    for gathers in (
        lambda x: x.gather(0, full[:, :4]),
        lambda x: x.gather(1, labels) + x.take_along_dim(labels.flatten()).sum(),
        lambda x: x.take_along_dim(full),
    ):
        check(gathers, operand(3, 8, cut=1, segments=(4, 4)), size=2, on_shards=False)
    check(lambda x, y: x.gather(0, (y * 2).long()), operand(3, 8), x, size=2, on_shards=False)
    check(lambda x: x.masked_select(x > 0.5), x, size=2, on_shards=False)


@pytest.mark.parametrize("index", [-100, 8])
@pytest.mark.parametrize("take", [Tensor.gather, Tensor.take_along_dim])
def test_a_position_out_of_bounds_is_found(take: Function, index: int) -> None:
    labels = torch.tensor([[1, index]])

    def on_rank(group: ThreadShardGroup) -> Tensor:
        x = Shard(torch.ones(1, 4), 1, (8,), group)
        found: Tensor = take(x, 1, labels) if take is Tensor.gather else take(x, labels, 1)
        return found

    with pytest.raises(IndexError):
        run_threads(2, on_rank)


def test_reading_memory_is_refused() -> None:
    def on_rank(group: ThreadShardGroup) -> None:
        with pytest.raises(ModuleError, match=r"data_ptr at .*test_indexing\.py"):
            Shard(torch.ones(2), 0, (4,), group).data_ptr()

    run_threads(2, on_rank)
