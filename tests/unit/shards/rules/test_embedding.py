"""Embeddings whose table is cut along words or features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from tests.unit.shards.agreement import Cut, agree, random
from tests.unit.shards.threads import ThreadShardGroup, run_threads

SIZES = (2, 3, 4)
WORDS = torch.tensor([[0, 3, 11, 5, 3], [7, 1, 2, 11, 0]])
TABLE = random(12, 24)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_vocabulary_has_one_sum(size: int, padding: int | None) -> None:
    ran = agree(lambda words, table: F.embedding(words, table, padding), [WORDS, TABLE], {1: 0}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((None,), {"sum": 1}, {})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("segments", [(24,), (12, 12)])
def test_features_have_none(size: int, segments: tuple[int, ...]) -> None:
    cut = Cut(dim=1, segments=segments)
    ran = agree(lambda words, table: F.embedding(words, table, 3), [WORDS, TABLE], {1: cut}, size)
    assert (ran.cuts, ran.forward, ran.backward) == ((Layout(2, segments),), {}, {})


def test_words_that_are_cut() -> None:
    ran = agree(F.embedding, [WORDS[:, :4], TABLE], {0: 1}, 2)
    assert (ran.cuts, ran.backward) == ((Layout(1, (4,)),), {"sum": 1})


@pytest.mark.parametrize("word", [-1, 12])
def test_a_word_out_of_bounds_is_found(word: int) -> None:
    def rank(group: ThreadShardGroup) -> Tensor:
        return F.embedding(torch.tensor([1, word]), Shard(TABLE[:6], 0, (12,), group))

    with pytest.raises(IndexError, match="out of range"):
        run_threads(2, rank)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_options_without_a_form_gather(options: dict[str, Any]) -> None:
    table = TABLE / 100
    agree(lambda words, own: F.embedding(words, own * 1, **options), [WORDS, table], {1: 0}, 2, gathers=["embedding"])


def test_other_cuts_gather() -> None:
    agree(F.embedding, [WORDS, TABLE], {1: Cut(dim=0, segments=(4, 8))}, 2, gathers=["embedding"])
    agree(F.embedding, [WORDS[:, :4], TABLE], {0: 1, 1: 0}, 2, gathers=["embedding"])
