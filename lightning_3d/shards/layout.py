"""How one dim of a tensor is cut over a group: which positions each rank holds, and how the parts become a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """One dim, cut in segments of which every rank holds its part.

    A plain weight is one segment. A packed one (q, k and v in one matrix) has a segment for each part, so that a rank
    holds its rows of every part, one after the other.

    Attributes:
        dim: The dim that is cut, counted from the front.
        segments: Global lengths; each is a multiple of the group's size. Their sum is the dim's global length.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def length(self) -> int:
        """Global length of the dim."""
        return sum(self.segments)

    @property
    def packed(self) -> bool:
        """Whether the positions of a rank are not one run."""
        return len(self.segments) > 1

    def fits(self, size: int) -> bool:
        """Whether every segment can be cut in ``size`` equal parts."""
        return all(segment % size == 0 for segment in self.segments)

    def runs(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Returns the (start, length) of each run of positions that a rank holds, in global order."""
        starts = (0, *accumulate(self.segments))
        return tuple(
            (start + rank * (segment // size), segment // size)
            for start, segment in zip(starts, self.segments, strict=False)
        )

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's part of a whole tensor: a view if the layout is not packed."""
        return take(whole, self.dim, self.segments, rank, size)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor from the parts of all ranks, in order."""
        return join(parts, self.dim, self.segments)

    def __str__(self) -> str:
        return f"dim {self.dim}" + (f" in {'|'.join(map(str, self.segments))}" if self.packed else "")


def take(whole: Tensor, dim: int, segments: Sequence[int], rank: int, size: int) -> Tensor:
    """Returns a rank's part of a whole tensor: a view if there is one segment."""
    if len(segments) == 1:
        length = segments[0] // size
        return whole.narrow(dim, rank * length, length)
    runs = Layout(dim, tuple(segments)).runs(rank, size)
    return torch.cat([whole.narrow(dim, start, length) for start, length in runs], dim)


def join(parts: Sequence[Tensor], dim: int, segments: Sequence[int]) -> Tensor:
    """Returns the whole tensor from the parts of all ranks, in order."""
    if len(segments) == 1:
        return torch.cat(tuple(parts), dim)
    lengths = [segment // len(parts) for segment in segments]
    cut = [part.split(lengths, dim) for part in parts]
    return torch.cat([pieces[index] for index in range(len(segments)) for pieces in cut], dim)


def by_rank(whole: Tensor, dim: int, segments: Sequence[int], size: int) -> Tensor:
    """Returns a whole tensor in the order of the ranks: the part of each in one run."""
    if len(segments) == 1:
        return whole
    return torch.cat([take(whole, dim, segments, rank, size) for rank in range(size)], dim)
