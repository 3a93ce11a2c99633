from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from lightning_3d.parallel.pipeline.balance import balanced

VALID = [(layers, stages) for layers in range(1, 18) for stages in range(1, 6) if layers >= stages]


def _stage_costs(costs: list[float], layers: tuple[int, ...]) -> list[float]:
    ends = [sum(layers[: index + 1]) for index in range(len(layers))]
    return [sum(costs[end - count : end]) for end, count in zip(ends, layers, strict=True)]


def _all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, count), stages - 1):
        ends = (0, *cuts, count)
        yield tuple(after - before for before, after in pairwise(ends))


@pytest.mark.parametrize(("layers", "stages"), VALID)
def test_equal_blocks_differ_by_one_at_most(layers: int, stages: int) -> None:
    found = balanced([1.0] * layers, stages)
    assert sum(found) == layers
    assert len(found) == stages
    assert max(found) - min(found) == (layers % stages > 0)
    assert list(found) == sorted(found)


@pytest.mark.parametrize(("layers", "stages"), [case for case in VALID if case[0] <= 9])
def test_no_cut_is_better(layers: int, stages: int) -> None:
    generator = random.Random(layers * 10 + stages)
    costs = [generator.choice([0.5, 1.0, 1.0, 1.0, 4.0]) for _ in range(layers)]

    def quality(cut: tuple[int, ...]) -> tuple[float, float]:
        stage_costs = _stage_costs(costs, cut)
        return max(stage_costs), sum(cost * cost for cost in stage_costs)

    assert quality(balanced(costs, stages)) == min(map(quality, _all_cuts(layers, stages)))


def test_a_large_model_with_a_head() -> None:
    # Head and block of a model of width 12288 with 50257 tokens.
    assert balanced([1.0] * 95 + [1.34], 4) == (24, 24, 24, 24)


def test_an_expensive_head_stands_nearly_alone() -> None:
    assert balanced([1.0, 1.0, 1.0, 4.0], 2) == (3, 1)
