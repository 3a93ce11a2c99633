"""Where a row of blocks is cut so that the stages cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# Sums of the same costs in another order differ in their last bits.
_SLACK = 1 + 1e-9


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns how many blocks each stage gets, in model order: at least one.

    The largest stage costs as little as it can; of such cuts one is taken whose stages differ least. Where cuts are
    equal, the later stages get more blocks: the first keeps the most activations.

    Args:
        costs: Cost of each block, with what comes before the first and after each.
        stages: Number of stages, at most that of the blocks.
    """
    assert 1 <= stages <= len(costs), "the caller has checked that every stage gets a block"
    sums = (0.0, *accumulate(costs))
    bound = _least_bound(sums, stages) * _SLACK
    # Least sum of squares for the blocks from each on, over the stages that are left, and the end of the first of them.
    count = len(costs)
    best: list[tuple[float, int] | None] = [None] * count + [(0.0, count)]
    choices: list[list[int]] = []
    for left in range(stages):
        now: list[tuple[float, int] | None] = [None] * (count + 1)
        for first in range(count - left):
            now[first] = _best_end(first, sums, best, bound)
        best = now
        choices.append([-1 if choice is None else choice[1] for choice in now])
    return _followed(choices, count)


def _best_end(
    first: int, sums: Sequence[float], best: Sequence[tuple[float, int] | None], bound: float
) -> tuple[float, int] | None:
    found: tuple[float, int] | None = None
    for end in range(first + 1, len(sums)):
        cost = sums[end] - sums[first]
        if cost > bound:
            break
        rest = best[end]
        if rest is not None and (found is None or rest[0] + cost * cost < found[0] / _SLACK):
            found = (rest[0] + cost * cost, end)
    return found


def _followed(choices: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    layers, first = [], 0
    for choice in reversed(choices):
        layers.append(choice[first] - first)
        first = choice[first]
    assert first == count, "the stages hold every block"
    return tuple(layers)


def _least_bound(sums: Sequence[float], stages: int) -> float:
    """The cost of the largest stage, if it is as small as it can be."""
    count = len(sums) - 1
    least = list(sums[1:])
    for stage in range(1, stages):
        least = [
            min(max(least[first - 1], sums[end] - sums[first]) for first in range(stage, end))
            if end > stage
            else float("inf")
            for end in range(1, count + 1)
        ]
    return least[-1]
