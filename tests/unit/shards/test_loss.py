"""Losses over classes that are cut: equal to torch on the whole logits, in any reduction, and small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.counters import LiveBytes
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.loss import cross_entropy, nll_loss
from lightning_3d.shards.refusal import Unshardable
from tests.unit.shards.threads import ThreadShardGroup, compare, leaf, random, run_threads, whole

CLASSES = 16
SHAPES = ((5, CLASSES), (300, CLASSES), (2, CLASSES, 3), (2, CLASSES, 3, 2), (CLASSES,))


def classes_of(logits: Tensor, ignored: int | None) -> Tensor:
    """Class indices for logits; every third is ignored."""
    shape = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else ()
    targets = torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(2))
    if ignored is not None and targets.dim():
        targets.view(-1)[::3] = ignored
    return targets


def options_of(weighted: bool, **options: Any) -> dict[str, Any]:
    if weighted:
        options["weight"] = random(CLASSES, seed=3).abs() + 0.1
    return options


def class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_cross_entropy_of_classes(
    size: int, shape: tuple[int, ...], reduction: str, smoothing: float, weighted: bool
) -> None:
    logits = random(*shape) * 3
    targets = classes_of(logits, -100)
    options = options_of(weighted, reduction=reduction, label_smoothing=smoothing)
    compare(
        lambda local, group: cross_entropy(local, targets, group, classes=CLASSES, **options),
        lambda one: F.cross_entropy(one, targets, **options),
        logits,
        dim=class_dim(logits),
        size=size,
    )


@pytest.mark.parametrize("ignored", [0, 7, CLASSES - 1, -1])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_an_ignored_index_may_be_a_class(ignored: int, reduction: str) -> None:
    logits = random(6, CLASSES)
    targets = classes_of(logits, ignored)
    options: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction}
    for ours, theirs in ((cross_entropy, F.cross_entropy), (nll_loss, F.nll_loss)):
        compare(
            lambda local, group, ours=ours: ours(local, targets, group, classes=CLASSES, **options),
            lambda one, theirs=theirs: theirs(one, targets, **options),
            logits,
            dim=1,
            size=4,
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(("weighted", "smoothing"), [(False, 0.0), (True, 0.2)])
def test_cross_entropy_of_probabilities(
    size: int, shape: tuple[int, ...], reduction: str, weighted: bool, smoothing: float
) -> None:
    logits = random(*shape)
    dim = class_dim(logits)
    targets = random(*shape, seed=5).softmax(dim)
    options = options_of(weighted, reduction=reduction, label_smoothing=smoothing)

    def ours(local: Tensor, group: ShardGroup) -> Tensor:
        part = take(targets, dim, (CLASSES,), group.rank, group.size)
        return cross_entropy(local, part, group, classes=CLASSES, **options)

    compare(ours, lambda one: F.cross_entropy(one, targets, **options), logits, dim=dim, size=size)


def test_probabilities_get_their_gradient() -> None:
    logits, probabilities = random(5, CLASSES), random(5, CLASSES, seed=5).softmax(1)

    def ours(local: Tensor, group: ShardGroup) -> Tensor:
        return cross_entropy(take(logits, 1, (CLASSES,), group.rank, group.size), local, group, classes=CLASSES)

    compare(ours, lambda one: F.cross_entropy(logits, one), probabilities, dim=1, size=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_nll_loss(size: int, shape: tuple[int, ...], reduction: str, weighted: bool) -> None:
    logits = random(*shape)
    targets = classes_of(logits, -100)
    options = options_of(weighted, reduction=reduction)
    compare(
        lambda local, group: nll_loss(local, targets, group, classes=CLASSES, **options),
        lambda one: F.nll_loss(one, targets, **options),
        logits,
        dim=class_dim(logits),
        size=size,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_learn_from(smoothing: float, rows: int) -> None:
    logits, targets = random(rows, CLASSES), torch.full((rows,), -100)
    for reduction in ("mean", "sum", "none"):
        compare(
            lambda local, group, how=reduction: cross_entropy(
                local, targets, group, classes=CLASSES, reduction=how, label_smoothing=smoothing
            ),
            lambda one, how=reduction: F.cross_entropy(one, targets, reduction=how, label_smoothing=smoothing),
            logits,
            dim=1,
            size=2,
        )


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_logits_neither_overflow_nor_lose_digits(scale: float) -> None:
    logits = (random(6, CLASSES) * scale).float()
    logits[:, 3] += scale
    targets = classes_of(logits, None)
    compare(
        lambda local, group: cross_entropy(local, targets, group, classes=CLASSES, reduction="none"),
        lambda one: F.cross_entropy(one, targets, reduction="none"),
        logits,
        dim=1,
        size=2,
        tolerance=2e-7,
    )


def test_masked_classes_and_broken_rows() -> None:
    logits = random(5, CLASSES)
    logits[0, : CLASSES // 2] = -math.inf  # a whole part
    logits[1, 9] = -math.inf
    logits[2] = -math.inf
    logits[3, 2] = math.inf
    logits[4] = math.nan
    targets = torch.tensor([12, 9, 1, 2, -100])
    compare(
        lambda local, group: cross_entropy(local, targets, group, classes=CLASSES, reduction="none"),
        lambda one: F.cross_entropy(one, targets, reduction="none"),
        logits,
        dim=1,
        size=2,
    )


def test_single_precision_is_as_exact_as_torch() -> None:
    logits, targets = random(300, 64, dtype=torch.float32) * 4, torch.arange(300) % 64
    # A sum of 64 powers and one of 300 losses, each a few roundings of 6e-8.
    compare(
        lambda local, group: cross_entropy(local, targets, group, classes=64, label_smoothing=0.1),
        lambda one: F.cross_entropy(one, targets, label_smoothing=0.1),
        logits,
        dim=1,
        size=4,
        tolerance=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_half_precision_is_rounded_once(dtype: torch.dtype, wide: bool, reduction: str) -> None:
    logits, targets = (random(40, 64) * 3).to(dtype), torch.arange(40) % 64
    one = logits.double().requires_grad_()
    expected = F.cross_entropy(one, targets, reduction=reduction)
    (gradient,) = torch.autograd.grad(expected.sum(), one)
    plain = F.cross_entropy(logits.float() if wide else logits, targets, reduction=reduction)

    def fn(group: ThreadShardGroup) -> tuple[Tensor, Tensor]:
        local = leaf(logits, 1, group)
        loss = cross_entropy(local, targets, group, classes=64, reduction=reduction, wide=wide)
        loss.sum().backward()
        assert local.grad is not None
        return loss.detach(), local.grad

    results = run_threads(2, fn)
    half, single = torch.finfo(dtype).eps / 2, 1e-6
    for loss, _ in results:
        assert loss.dtype == plain.dtype
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=single + half * (not wide), atol=single)
    found = whole([each for _, each in results], 1)
    assert found.dtype == dtype
    # What is below the normal numbers of float16 is rounded to multiples of its smallest.
    torch.testing.assert_close(found.double(), gradient, rtol=single + half, atol=single)


@pytest.mark.parametrize("target", [CLASSES, -1])
@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
def test_a_class_that_does_not_exist_is_found(target: int, loss: Any) -> None:
    logits, targets = random(3, CLASSES), torch.tensor([0, target, 1])
    with pytest.raises(IndexError):
        run_threads(2, lambda group: loss(leaf(logits, 1, group), targets, group, classes=CLASSES))


def test_invalid_values_are_told() -> None:
    logits, targets = random(3, CLASSES), torch.tensor([0, 1, 2])
    for options, text in (({"reduction": "median"}, "median"), ({"label_smoothing": 1.5}, "1.5")):
        with pytest.raises(ValueError, match=text):
            run_threads(
                1, lambda group, options=options: cross_entropy(logits, targets, group, classes=CLASSES, **options)
            )


@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
def test_weights_with_a_gradient_are_refused(loss: Any) -> None:
    logits, targets = random(3, CLASSES), torch.tensor([0, 1, 2])
    weight = torch.ones(CLASSES, requires_grad=True)
    with pytest.raises(Unshardable, match="weights"):
        run_threads(1, lambda group: loss(logits, targets, group, classes=CLASSES, weight=weight))


def test_targets_of_bytes() -> None:
    logits, targets = random(3, CLASSES), torch.tensor([0, 9, 15], dtype=torch.uint8)
    compare(
        lambda local, group: cross_entropy(local, targets, group, classes=CLASSES),
        lambda one: F.cross_entropy(one, targets),
        logits,
        dim=1,
        size=2,
    )


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
def test_a_mode_sees_one_call(loss: Any) -> None:
    logits, targets = random(3, CLASSES), torch.tensor([0, 1, 2])

    def fn(group: ThreadShardGroup) -> list[Any]:
        local = leaf(logits, 1, group)
        with Seen() as seen:
            loss(local, targets, group, classes=CLASSES, reduction="sum")
        return seen.functions

    assert run_threads(2, fn) == [[loss], [loss]]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2.25), (torch.bfloat16, 2.5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_second_copy_of_the_logits(dtype: torch.dtype, limit: float, smoothing: float) -> None:
    rows, classes = 2048, 4096
    targets = torch.arange(rows)
    options: dict[str, Any] = {"classes": classes, "label_smoothing": smoothing, "wide": True}

    def fn(group: ThreadShardGroup) -> tuple[float, float]:
        local = torch.randn(rows, classes // group.size, dtype=dtype).requires_grad_()
        if group.rank:  # the other rank works alike, unwatched
            cross_entropy(local, targets, group, **options).backward()
            return 0.0, 0.0
        with LiveBytes() as live:
            live.track(local)
            loss = cross_entropy(local, targets, group, **options)
            held = live.current
            loss.backward()
        return live.peak.size / local.nbytes, held / local.nbytes

    peak, held = run_threads(2, fn)[0]
    assert 2 <= peak <= limit
    assert held <= 1.02
