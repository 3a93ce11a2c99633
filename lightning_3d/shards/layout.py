"""How one dim of a tensor is cut over a group: which positions each rank holds, and how the parts become a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """One dim, cut in segments of which every rank holds its part.

    A plain weight is one segment. A packed one (q, k and v in one matrix) has a segment for each part, so that a rank
    holds its rows of every part, one after the other.

    A single segment may be cut unevenly: all parts have one length but the last, which is shorter. What is computed
    sees no more than that. Where the ranks need memory of one size, for parameters at rest and for what they exchange,
    the last part is padded with zeros at its end.

    Attributes:
        dim: The dim that is cut, counted from the front.
        segments: Global lengths, multiples of the group's size if there are several. Their sum is the dim's global
            length.
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

    def fits(self, size: int, *, padded: bool = False) -> bool:
        """Whether the dim can be cut for so many ranks.

        Args:
            size: Number of ranks.
            padded: Whether parts may be uneven; even so every rank holds something.
        """
        if padded and not self.packed:
            return (size - 1) * longest(self.length, size) < self.length
        return is_even(self.segments, size)

    def padded_length(self, size: int) -> int:
        """Returns the length of each rank's part with its padding."""
        return sum(longest(segment, size) for segment in self.segments)

    def runs(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Returns the (start, length) of each run of positions that a rank holds, in global order."""
        starts = (0, *accumulate(self.segments))
        return tuple(
            (start + rank * longest(segment, size), own_length(segment, rank, size))
            for start, segment in zip(starts, self.segments, strict=False)
        )

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's part of a whole tensor: a view if the layout is not packed."""
        return take(whole, self.dim, self.segments, rank, size)

    def padded(self, part: Tensor, size: int) -> Tensor:
        """Returns a rank's part with its padding: itself if it needs none."""
        return padded(part, self.dim, self.segments, size)

    def without_padding(self, part: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's part without its padding: a view."""
        if is_even(self.segments, size):
            return part
        return part.narrow(self.dim, 0, own_length(self.length, rank, size))

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor from the parts of all ranks, in order, with or without their padding."""
        return join(parts, self.dim, self.segments)

    def __str__(self) -> str:
        return f"dim {self.dim}" + (f" in {'|'.join(map(str, self.segments))}" if self.packed else "")


def longest(length: int, size: int) -> int:
    """Returns the length of every part of one segment but the last."""
    return -(-length // size)


def own_length(length: int, rank: int, size: int) -> int:
    """Returns the length of a rank's part of one segment."""
    most = longest(length, size)
    return min(most, length - rank * most)


def is_even(segments: Sequence[int], size: int) -> bool:
    """Returns whether all parts of every segment have one length."""
    return all(segment % size == 0 for segment in segments)


def take(whole: Tensor, dim: int, segments: Sequence[int], rank: int, size: int) -> Tensor:
    """Returns a rank's part of a whole tensor: a view if there is one segment."""
    if len(segments) == 1:
        return whole.narrow(dim, rank * longest(segments[0], size), own_length(segments[0], rank, size))
    runs = Layout(dim, tuple(segments)).runs(rank, size)
    return torch.cat([whole.narrow(dim, start, length) for start, length in runs], dim)


def join(parts: Sequence[Tensor], dim: int, segments: Sequence[int]) -> Tensor:
    """Returns the whole tensor from the parts of all ranks, in order, with or without their padding."""
    if len(segments) == 1:
        surplus = sum(part.shape[dim] for part in parts) - segments[0]
        last = parts[-1].narrow(dim, 0, parts[-1].shape[dim] - surplus) if surplus else parts[-1]
        return torch.cat((*parts[:-1], last), dim)
    lengths = [segment // len(parts) for segment in segments]
    cut = [part.split(lengths, dim) for part in parts]
    return torch.cat([pieces[index] for index in range(len(segments)) for pieces in cut], dim)


def by_rank(whole: Tensor, dim: int, segments: Sequence[int], size: int) -> Tensor:
    """Returns a whole tensor in the order of the ranks: the part of each in one run, with its padding."""
    if len(segments) == 1:
        return extended(whole, dim, size * longest(segments[0], size))
    return torch.cat([take(whole, dim, segments, rank, size) for rank in range(size)], dim)


def padded(part: Tensor, dim: int, segments: Sequence[int], size: int) -> Tensor:
    """Returns a rank's part as long as those of all ranks, with zeros at its end; itself if it is."""
    return part if len(segments) > 1 else extended(part, dim, longest(segments[0], size))


def extended(value: Tensor, dim: int, length: int) -> Tensor:
    """Returns a tensor with zeros at the end of a dim, as long as ``length``; itself if it is."""
    missing = length - value.shape[dim]
    return F.pad(value, [0, 0] * (value.dim() - 1 - dim % value.dim()) + [0, missing]) if missing else value
