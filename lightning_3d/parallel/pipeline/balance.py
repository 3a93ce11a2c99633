"""Where a row of blocks is cut so that the stages cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Sums of the same costs in another order differ in their last bits.
_SLACK = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class _Cut:
    """The best stages for the blocks from one on.

    Attributes:
        costs: Sum of the squares of their costs.
        layers: Sum of the squares of their numbers of blocks.
        end: The block after the first of them.
    """

    costs: float
    layers: int
    end: int

    def is_better(self, other: _Cut) -> bool:
        """Returns whether the costs differ less, or the numbers of blocks where the costs are equal."""
        if self.costs * _SLACK < other.costs:
            return True
        return self.costs <= other.costs * _SLACK and self.layers < other.layers


def balanced(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns how many blocks each stage gets, in model order: at least one.

    The largest stage costs as little as it can; of such cuts one is taken whose stages differ least in cost, then in
    their number of blocks. Where all that is equal, later stages get more blocks: the first keeps the most activations.

    Args:
        costs: Cost of each block, with what comes before the first and after each.
        stages: Number of stages, at most that of the blocks.
    """
    assert 1 <= stages <= len(costs), "the caller has checked that every stage gets a block"
    count, sums = len(costs), (0.0, *accumulate(costs))
    bound = _least_bound(sums, stages) * _SLACK
    best: list[_Cut | None] = [None] * count + [_Cut(0.0, 0, count)]
    choices: list[list[_Cut | None]] = []
    for _ in range(stages):
        best = [_best_cut(first, sums, best, bound) for first in range(count)] + [None]
        choices.append(best)
    layers, first = [], 0
    for choice in reversed(choices):
        cut = choice[first]
        assert cut is not None, "the bound can be kept"
        layers.append(cut.end - first)
        first = cut.end
    return tuple(layers)


def _best_cut(first: int, sums: Sequence[float], rest: Sequence[_Cut | None], bound: float) -> _Cut | None:
    """The best first stage from a block on, before stages that are known for each of its ends."""
    found: _Cut | None = None
    for end in range(first + 1, len(sums)):
        cost, after = sums[end] - sums[first], rest[end]
        if cost > bound:
            break
        if after is not None:
            cut = _Cut(after.costs + cost * cost, after.layers + (end - first) ** 2, end)
            found = cut if found is None or cut.is_better(found) else found
    return found


def _least_bound(sums: Sequence[float], stages: int) -> float:
    """The cost of the largest stage, if it is as small as it can be."""
    least = list(sums[1:])
    for stage in range(1, stages):
        least = [
            min((max(least[first - 1], sums[end] - sums[first]) for first in range(stage, end)), default=float("inf"))
            for end in range(1, len(sums))
        ]
    return least[-1]
