"""Losses over classes that are cut, and losses element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random

SIZES = (2, 3, 4)
LOGITS, CLASSES = random(6, 12), torch.tensor([0, 3, 11, -100, 5, 3])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "ignore_index": 3},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": random(12).abs()},
    ],
)
def test_cross_entropy(size: int, options: dict[str, Any]) -> None:
    loss = nn.CrossEntropyLoss(**options)
    classes = CLASSES.clamp_min(0) if "ignore_index" in options else CLASSES
    ran = agree(lambda logits: loss(logits, classes), [LOGITS], {0: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"max": 1, "sum": 1}, {})


@pytest.mark.parametrize("size", SIZES)
def test_language_model(size: int) -> None:
    def loss(hidden: Tensor, head: Tensor, words: Tensor) -> Tensor:
        logits = F.linear(hidden * 2, head)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), words.view(-1))

    ran = agree(loss, [random(2, 3, 4), random(12, 4), torch.arange(6).view(2, 3)], {1: 0}, size)
    assert (ran.forward, ran.backward) == ({"max": 1, "sum": 1}, {"sum": 1})


@pytest.mark.parametrize("size", SIZES)
def test_class_probabilities(size: int) -> None:
    targets = random(6, 12, seed=4).softmax(1)
    assert agree(lambda logits: F.cross_entropy(logits, targets), [LOGITS], {0: 1}, size).cuts == (None,)
    agree(lambda logits: F.cross_entropy(logits, logits.detach().softmax(1)), [LOGITS], {0: 1}, size)


@pytest.mark.parametrize("size", SIZES)
def test_nll_loss(size: int) -> None:
    ran = agree(lambda logits: F.nll_loss(F.log_softmax(logits, 1), CLASSES), [LOGITS], {0: 1}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"max": 1, "sum": 2}, {"sum": 1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "function", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]
)
def test_element_by_element(function: Any, reduction: str, size: int) -> None:
    targets = random(6, 12, seed=4).sigmoid()
    ran = agree(lambda x: function(x, targets, reduction=reduction), [LOGITS], {0: 1}, size)
    assert ran.cuts == ((Layout(1, (12,)),) if reduction == "none" else (None,))
    assert ran.forward == ({} if reduction == "none" else {"sum": 1})


def test_distillation() -> None:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(student, -1), F.log_softmax(teacher, -1), reduction="batchmean", log_target=True)

    assert agree(loss, [LOGITS, random(6, 12, seed=2)], {0: 1, 1: 1}, 2).cuts == (None,)


def test_without_a_form_they_gather() -> None:
    wide = Cut(dim=1, segments=(4, 8))
    agree(lambda x: F.cross_entropy(x, CLASSES), [LOGITS], {0: wide}, 2, gathers=["cross_entropy"])
    agree(lambda x: F.cross_entropy(x, CLASSES), [LOGITS], {0: 0}, 2, gathers=["cross_entropy"])
    agree(lambda x: F.nll_loss(x, CLASSES), [LOGITS], {0: 0}, 2, gathers=["nll_loss"])
    weight = torch.ones(12, dtype=torch.float64)
    function = F.binary_cross_entropy_with_logits
    agree(
        lambda x: function(x, x.detach().sigmoid(), pos_weight=weight), [LOGITS], {0: 1}, 2, gathers=[function.__name__]
    )
