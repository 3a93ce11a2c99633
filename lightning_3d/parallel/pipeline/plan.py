"""The decisions of the pipeline axis: which blocks make a stage, which rank owns it, and who holds which parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.parallel.pipeline.record.step import Value
from lightning_3d.units import format_bytes

# What a text shows of a long list.
_SHOWN = 4


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

    def __str__(self) -> str:
        head = f"{'stage':<6} {'rank':<5} {'layers':>6} {'cost':>7} {'receives':>12}  blocks"
        return "\n".join([f"{'pipeline':<10} {self._summary}", head, *self._rows(), *self._beside(), *self._shared()])

    @property
    def _summary(self) -> str:
        return f"{self.ranks} ranks, {self.schedule}, {len(self.blocks)} blocks on {len(self.stages)} stages"

    def _rows(self) -> Iterator[str]:
        for stage, values in zip(self.stages, self.boundaries, strict=True):
            names = self.blocks[stage.first : stage.end]
            blocks = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            received = format_bytes(sum(value.nbytes for value in values)) if values else "-"
            yield f"{stage.index:<6} {stage.rank:<5} {stage.layers:>6} {stage.cost:>7.1%} {received:>12}  {blocks}"
            yield from (f"{'':<12} <- {text}" for text in _some(values))

    def _beside(self) -> Iterator[str]:
        blocks = frozenset(self.blocks)
        for stage in self.stages:
            names = [name for name, stages in self.modules.items() if stage.index in stages and name not in blocks]
            if names:
                yield f"{'':<6} stage {stage.index} also calls {', '.join(_some(names))}"

    def _shared(self) -> Iterator[str]:
        on = {name: ", ".join(map(str, stages)) for name, stages in self.holders.items() if len(stages) > 1}
        shared = [f"{name} (stages {stages})" for name, stages in on.items()]
        if shared:
            yield f"{'':<6} on several stages, gradients summed: {', '.join(_some(shared))}"


def _some(values: Sequence[object]) -> list[str]:
    """The first of some values as texts, and how many there are beside them."""
    shown = [str(value) for value in values[:_SHOWN]]
    return [*shown, f"{len(values) - _SHOWN} more"] if len(values) > _SHOWN else shown
