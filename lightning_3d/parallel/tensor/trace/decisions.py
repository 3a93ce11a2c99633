"""What a trace has learned about weights so far: which cannot be cut, and in which segments others must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

# A weight packed of more parts than these is cut at each head, which no attention can use.
_MOST_PARTS = 64


class Decisions:
    """Grows from pass to pass and never forgets, so that a trace comes to an end.

    Attributes:
        count: Number of decisions that were made.
        rejected: Why weights stay whole, by first names.
        segments: In what packed weights are cut, by first names.

    Args:
        size: Number of ranks.
        forbidden: Weights that must stay whole, and why.
        forced: Weights that are cut, whatever it costs.
    """

    def __init__(self, size: int, forbidden: Mapping[str, str], forced: Iterable[str]) -> None:
        self.count = 0
        self.rejected = dict(forbidden)
        self.segments: dict[str, tuple[int, ...]] = {}
        self._size = size
        self._forced = frozenset(forced)
        # What to tell if a weight cannot be cut in the end.
        self._suspects: dict[str, str] = {}

    def reject(self, names: Iterable[str], reason: str) -> None:
        """Weights stay whole from the next pass on; forced ones are cut all the same."""
        for name in names:
            if name not in self.rejected and name not in self._forced:
                suspect = self._suspects.get(name)
                self.rejected[name] = reason if suspect is None else f"{suspect} ({reason})"
                self.count += 1

    def suspect(self, names: Iterable[str], reason: str) -> None:
        """Weights are cut in a way that may fail later, and would fail for this reason."""
        for name in names:
            self._suspects.setdefault(name, reason)

    def need(self, cut: Mapping[str, tuple[int, ...]], segments: Sequence[int], reason: str) -> None:
        """Weights are cut in segments from the next pass on, besides those that they have.

        Args:
            cut: By name of the weight, its segments in this pass.
            segments: What an operation needs, of a dim that stands for that one and may have another length.
            reason: The operation.
        """
        for name, present in cut.items():
            if name in self._forced or name in self.rejected:
                continue
            known = self.segments.get(name, present)
            found = self._merged(known, segments)
            if found is None or found == present:
                self.reject([name], reason)
            elif found != known:
                self.segments[name] = found
                self.count += 1

    def start(self, name: str, segments: tuple[int, ...]) -> None:
        """A weight is known to be packed of these."""
        self.segments.setdefault(name, segments)

    def copy(self, name: str, other: str) -> None:
        """Holds for ``other`` what holds for ``name``, as for a block that repeats another."""
        if name in self.rejected and other not in self._forced:
            self.rejected.setdefault(other, self.rejected[name])
        if name in self.segments:
            self.segments[other] = self.segments[name]

    def _merged(self, before: tuple[int, ...], segments: Sequence[int]) -> tuple[int, ...] | None:
        """The segments of a weight with more boundaries; None if they cannot be."""
        scale = Fraction(sum(before), sum(segments))
        bounds: set[int | Fraction] = {0, *accumulate(before), *(each * scale for each in accumulate(segments))}
        merged = [end - start for start, end in pairwise(sorted(bounds))]
        if len(merged) > _MOST_PARTS or any(each % self._size for each in merged):
            return None
        return tuple(int(each) for each in merged)
