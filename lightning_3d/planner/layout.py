"""Which blocks lie on which pipeline rank, as far as a price depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_3d.errors import MeshError
from lightning_3d.parallel.pipeline.balance import balanced
from lightning_3d.parallel.pipeline.placement import ranks_of_stages


# Compared as objects, as figures are remembered for each.
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind:
    """Pipeline ranks that hold the same.

    Attributes:
        spans: For each stage of the first of them, its first block and the one after its last.
        blocks: Blocks on each of them.
        first: The first of these ranks.
        last: The last of them.
        count: How many they are.
        has_first: They hold the first stage.
        has_last: They hold the last stage.
        members: The ranks.
    """

    spans: tuple[tuple[int, int], ...]
    blocks: int
    first: int
    last: int
    count: int
    has_first: bool
    has_last: bool
    members: tuple[int, ...]

    def sum(self, prefix: Sequence[float]) -> float:
        """Returns the sum over the blocks of one of these ranks.

        Args:
            prefix: Sums over the blocks before each block, and over all.
        """
        return sum([prefix[end] - prefix[begin] for begin, end in self.spans])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """Blocks on pipeline ranks.

    Attributes:
        kinds: Ranks by what they hold.
    """

    kinds: tuple[Kind, ...]

    def kind_of(self, rank: int) -> Kind:
        """Returns what a pipeline rank holds."""
        return next(kind for kind in self.kinds if rank in kind.members)


def place_blocks(
    costs: Sequence[float],
    *,
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    last_cost: float = 0.0,
    layers_per_stage: Sequence[int] | None = None,
    uniform: bool = False,
) -> Layout:
    """Returns where the blocks of a model lie; there are as many blocks as stages, or more.

    Args:
        costs: Cost of each block.
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        stages_per_rank: Stages that each rank owns.
        last_cost: Of what runs after the blocks, in the same unit.
        layers_per_stage: Blocks of each stage; None: so that the largest stage costs least.
        uniform: All blocks are equal.

    Raises:
        MeshError: The layers do not add up.
    """
    stages, count = ranks * stages_per_rank, len(costs)
    if layers_per_stage is not None and (len(layers_per_stage) != stages or sum(layers_per_stage) != count):
        raise MeshError(
            f"layers_per_stage has {len(layers_per_stage)} stages with {sum(layers_per_stage)} blocks in all, "
            f"the mesh has {stages} stages and the model {count} blocks."
        )
    layers = tuple(layers_per_stage or _balanced(costs, stages, last_cost))
    ends = tuple(accumulate(layers, initial=0))
    placed = ranks_of_stages(schedule, ranks, stages_per_rank)
    stages_of: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placed):
        stages_of[rank].append(stage)
    groups: dict[tuple[int, int, bool, bool], list[int]] = {}
    for rank, own in enumerate(stages_of):
        # Blocks that differ make ranks differ too.
        key = sum(layers[stage] for stage in own), -1 if uniform else rank, rank == placed[0], rank == placed[-1]
        groups.setdefault(key, []).append(rank)
    kinds = [
        Kind(
            spans=tuple((ends[stage], ends[stage + 1]) for stage in stages_of[members[0]]),
            blocks=blocks,
            first=members[0],
            last=members[-1],
            count=len(members),
            has_first=has_first,
            has_last=has_last,
            members=tuple(members),
        )
        for (blocks, _, has_first, has_last), members in groups.items()
    ]
    return Layout(kinds=tuple(kinds))


def _balanced(costs: Sequence[float], stages: int, last_cost: float) -> tuple[int, ...]:
    if stages == 1:
        return (len(costs),)
    if min(costs) == max(costs) and costs[0] > 0:
        return _equal(len(costs), stages, last_cost / costs[0])
    return balanced([*costs[:-1], costs[-1] + last_cost], stages)


def _equal(count: int, stages: int, after: float) -> tuple[int, ...]:
    """The cut of equal blocks: ``balanced`` in closed form.

    Args:
        count: Number of blocks.
        stages: Number of stages.
        after: What follows the last block, in blocks.
    """
    rest = stages - 1

    def price(last: int) -> tuple[float, float, int]:
        base, more = divmod(count - last, rest)
        blocks = (rest - more) * base**2 + more * (base + 1) ** 2
        largest = max(base + (1 if more else 0), last + after)
        # As in balanced(): the largest, then how costs differ, then how numbers of blocks do.
        return round(largest, 6), round(blocks + (last + after) ** 2, 6), blocks + last**2

    last = min(range(1, -(-count // stages) + 1), key=lambda last: (*price(last), -last))
    base, more = divmod(count - last, rest)
    return (*(base,) * (rest - more), *(base + 1,) * more, last)
