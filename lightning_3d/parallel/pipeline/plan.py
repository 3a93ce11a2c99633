"""The decisions of the pipeline axis: which blocks make a stage, which rank owns it, and who holds which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.parallel.pipeline.record.step import Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        index: Its place in model order.
        rank: The pipeline rank that owns it.
        first: Number of its first block.
        end: Number of the block after its last.
        cost: Its part of the floating point operations of a forward pass.
    """

    index: int
    rank: int
    first: int
    end: int
    cost: float = 0.0

    @property
    def layers(self) -> int:
        """Its blocks."""
        return self.end - self.first


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The plan of the pipeline axis.

    Attributes:
        schedule: Name of the schedule.
        ranks: Degree of the axis.
        blocks: Names of all blocks in the order of their calls.
        stages: The stages, in model order.
        holders: The stages that hold each parameter, lowest first, by first names; the lowest is its owner.
        modules: The stages that call each watched module, lowest first.
        boundaries: What each stage is sent by the one before; nothing for the first.
    """

    schedule: str
    ranks: int
    blocks: tuple[str, ...]
    stages: tuple[Stage, ...]
    holders: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, tuple[int, ...]]
    boundaries: tuple[tuple[Value, ...], ...]

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """Returns the stages of a pipeline rank, in model order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def ranks_holding(self, parameter: str) -> tuple[int, ...]:
        """Returns the pipeline ranks on which a parameter lives, that of its owner first."""
        return tuple(dict.fromkeys(self.stages[index].rank for index in self.holders[parameter]))

    def is_present(self, parameter: str, rank: int) -> bool:
        """Returns whether a parameter lives on a pipeline rank."""
        return rank in self.ranks_holding(parameter)

    @property
    def last_rank(self) -> int:
        """The pipeline rank that owns the last stage, where the loss is computed."""
        return self.stages[-1].rank

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The pipeline ranks of each parameter that lives on more than one of them."""
        found = {name: self.ranks_holding(name) for name in self.holders}
        return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) > 1}
