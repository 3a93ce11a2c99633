"""What a dry run has found: values, as text and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.counters import Category, CollectiveTable, PeakReport
from lightning_3d.dryrun.beside import Beside
from lightning_3d.mesh.spec import AXIS_KEYS, Coordinate
from lightning_3d.plan import Plan
from lightning_3d.units import counted, format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """What shards hold beyond the parameters, because dim 0 is cut in equal parts.

    Attributes:
        stored: Bytes of this rank's shards, padding included.
        needed: Bytes that equal shares of the parameters alone would take.
    """

    stored: int = 0
    needed: float = 0

    @property
    def share(self) -> float:
        """Padding as a share of what is needed; gathers and reductions send as much more."""
        return self.stored / self.needed - 1 if self.needed else 0.0

    def __str__(self) -> str:
        return f"{format_bytes(self.stored - self.needed)} of {format_bytes(self.stored)} in shards (+{self.share:.1%})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What is alive at one moment of a step.

    Attributes:
        operation: Number of the operation.
        phase: What runs.
        categories: Bytes by category.
    """

    operation: int
    phase: str
    categories: Mapping[Category, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank does in an optimizer step.

    Attributes:
        rank: The global rank.
        at: Its coordinate.
        stages: The stages that it owns; empty without a pipeline.
        between_steps: Live bytes when a step begins.
        peak: The most live bytes, and what they are.
        traffic: Collectives of the step, by operation and axis.
        padding: What shards hold beyond parameters.
        in_flight: The most micro-batches that wait for their backward at a time, over all stages of the rank.
        samples: Live bytes over the step, where they were asked for.
        seconds: What measuring took.
        beside: What the planner predicts of it; None where it was not asked.
    """

    rank: int
    at: Coordinate
    stages: tuple[int, ...] = ()
    between_steps: int
    peak: PeakReport
    traffic: CollectiveTable
    padding: Padding
    in_flight: int
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    beside: Beside | None = None

    @property
    def title(self) -> str:
        """The rank in one line."""
        owned = f", {'stage' if len(self.stages) == 1 else 'stages'} {', '.join(map(str, self.stages))}"
        return f"rank {self.rank} at {self.at}{owned if self.stages else ''}"

    def __str__(self) -> str:
        lines = [
            self.title,
            *_indented(str(self.peak)),
            f"  between steps {format_bytes(self.between_steps)}; {counted(self.in_flight, 'micro-batch')} in flight",
            f"  padding {self.padding}",
            "  collectives of an optimizer step",
            *_indented(str(self.traffic), 4),
        ]
        if self.beside is not None:
            lines += ["  the planner's formulas beside this", *_indented(str(self.beside), 4)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport:
    """What a dry run has found.

    Attributes:
        plan: The plan of all ranks.
        precision: Its precision.
        microbatches: Samples of each micro-batch of a rank's batch.
        batches: Batches of an optimizer step.
        ranks: What the ranks do that were played.
        notes: What is not as in training.
        seconds: What it took, from building the module on.
    """

    plan: Plan
    precision: str
    microbatches: tuple[int, ...]
    batches: int
    ranks: tuple[RankReport, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def worst(self) -> RankReport:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.peak.size)

    def __str__(self) -> str:
        several = len(set(self.microbatches)) > 1
        sizes = (
            f"{', '.join(map(str, self.microbatches))} samples" if several else f"{self.microbatches[0]} samples each"
        )
        head = [
            f"dry run    {self.plan.mesh}, {self.precision}",
            f"model      {self.plan.parameters}",
            f"data axis  {self.plan.data}",
            f"step       {counted(self.batches, 'batch')} of {counted(len(self.microbatches), 'micro-batch')}, {sizes}",
        ]
        tail = [f"note: {note}" for note in self.notes]
        worst = self.worst
        tail.append(
            f"highest peak {format_bytes(worst.peak.peak.size)} on {worst.title}; tensors alone, without what an "
            f"allocator, a backend and the context of a device take; {format_seconds(self.seconds)}"
        )
        return "\n\n".join(["\n".join(head), *map(str, self.ranks), "\n".join(tail)])

    def as_data(self) -> dict[str, Any]:
        """Returns everything but the plan as plain containers, sizes in bytes."""
        return {
            "mesh": {key: self.plan.mesh.size(key) for key in AXIS_KEYS},
            "precision": self.precision,
            "microbatches": list(self.microbatches),
            "batches": self.batches,
            "notes": list(self.notes),
            "ranks": [_as_data(rank) for rank in self.ranks],
        }


def _as_data(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "coordinate": asdict(rank.at),
        "stages": list(rank.stages),
        "between_steps_bytes": rank.between_steps,
        "peak_bytes": rank.peak.peak.size,
        "peak_phase": rank.peak.peak.phase,
        "peak_by_category": _by_name(rank.peak.categories),
        "traffic": [asdict(row) for row in rank.traffic.rows],
        "padding": asdict(rank.padding),
        "in_flight": rank.in_flight,
        "planner": None if rank.beside is None else rank.beside.as_data(),
        "samples": [
            {"operation": each.operation, "phase": each.phase, "bytes": _by_name(each.categories)}
            for each in rank.samples
        ],
    }


def _by_name(categories: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: size for category, size in categories.items()}


def _indented(text: str, by: int = 2) -> list[str]:
    return [f"{' ' * by}{line}" for line in text.splitlines()]
