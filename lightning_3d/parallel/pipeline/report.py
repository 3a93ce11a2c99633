"""What the pipeline axis means for one run, as text: who holds what, what is sent, and who computes when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.pipeline.cost import boundary_traffic, pipeline_traffic, plan_timeline, receive_buffers
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.parallel.pipeline.schedule.timeline import Timeline, save_png
from lightning_3d.units import counted, format_bytes, format_count, format_seconds

# Characters of a row of the schedule; what a longer one leaves out repeats what it shows.
_WIDTH = 150


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReport:
    """The price of an optimizer step on the pipeline axis.

    Attributes:
        plan: The plan.
        parameters: The module's parameters.
        microbatches: Micro-batches of a batch.
        batches: Accumulated batches.
        whole_backward: Backwards are never split into halves.
    """

    plan: PipelinePlan
    parameters: ParameterTable
    microbatches: int
    batches: int = 1
    whole_backward: bool = False

    def timelines(self, measured: Timeline) -> StepTimelines:
        """Returns a measured step beside the one that its schedule would take."""
        run = len({event.action.microbatch for event in measured.events}) or self.microbatches
        return StepTimelines(measured=measured, theoretical=self._theoretical(run))

    def __str__(self) -> str:
        return "\n".join([*self._held(), *self._sent(), *self._schedule()])

    def _theoretical(self, microbatches: int) -> Timeline:
        return plan_timeline(self.plan, microbatches=microbatches, whole_backward=self.whole_backward)

    def _held(self) -> Iterator[str]:
        yield "what each pipeline rank holds, before the other axes divide it, and sends in an optimizer step"
        for rank in range(self.plan.ranks):
            held = [row for row in self.parameters.rows if self.plan.is_present(row.name, rank)]
            stages = ", ".join(str(stage.index) for stage in self.plan.stages_of(rank))
            traffic = pipeline_traffic(self.plan, rank=rank, microbatches=self.microbatches, batches=self.batches)
            buffers = receive_buffers(self.plan, rank=rank, microbatches=self.microbatches)
            yield (
                f"  rank {rank} with stage {stages}: {counted(len(held), 'parameter')} of "
                f"{format_count(sum(row.numel for row in held))} elements, "
                f"{format_bytes(sum(row.nbytes for row in held))}; sends {format_bytes(traffic.wire)}, "
                f"keeps {format_bytes(buffers)} to receive in"
            )

    def _sent(self) -> Iterator[str]:
        yield "what each micro-batch sends"
        yield from (f"  {crossing}" for crossing in boundary_traffic(self.plan))

    def _schedule(self) -> Iterator[str]:
        plan, count = self.plan, self.microbatches
        empty = runnable_microbatches(plan.schedule, ranks=plan.ranks, microbatches=count) - count
        padded = f" and {empty} empty ones, which it needs" if empty else ""
        head, *rows = self._theoretical(count).table().splitlines()
        yield f"{plan.schedule}, micro-batches {count}{padded}, by counted cost: {head}"
        yield from (f"  {row if len(row) <= _WIDTH else f'{row[:_WIDTH]} ...'}" for row in rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimelines:
    """One training step as it was, beside what its schedule would be without waits of any other kind.

    Attributes:
        measured: In seconds, on the machine's clock.
        theoretical: By the counted cost of the stages, a backward as long as two forwards.
    """

    measured: Timeline
    theoretical: Timeline

    def text(self, width: int = 120) -> str:
        """Returns both as rows of ranks in which time runs to the right.

        Args:
            width: Characters of each duration.
        """
        head = f"measured, {format_seconds(self.measured.duration)}: "
        return f"{head}{self.measured.text(width)}\ntheoretical: {self.theoretical.text(width)}"

    def save_png(self, path: str | Path) -> None:
        """Draws both, one below the other.

        Args:
            path: Where the picture is written.

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
        """
        units = {"measured": "seconds", "theoretical": "by the counted cost of the stages"}
        save_png(path, {"measured": self.measured, "theoretical": self.theoretical}, units)
