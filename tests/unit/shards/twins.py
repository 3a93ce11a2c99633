"""A group in one process, for tests of what a single rank does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join


class Twins(ShardGroup):
    """One of two ranks that hold the same."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(2, rank)

    def sum(self, value: Tensor) -> Tensor:
        return 2 * value

    def max(self, value: Tensor) -> Tensor:
        return value.clone()

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        return join([part, part], dim, segments)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        return 2 * value.chunk(2, dim)[self.rank]
