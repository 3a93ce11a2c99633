"""Memory of micro-batches that are not played: the buffers in which a schedule receives, one for each of them."""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.counters import Category, Peak, PeakReport
from lightning_3d.dryrun.planned import Planned
from lightning_3d.parallel.pipeline.schedule.boundary import slot_of


def missing_buffers(planned: Planned, rank: int) -> int:
    """Returns the bytes of the receive buffers that a schedule of all micro-batches has and the played one has not.

    torch makes them when a schedule is first run, and keeps them.

    Args:
        planned: The training and its plan.
        rank: The pipeline rank.
    """
    plan = planned.plan.pipeline
    if plan is None or planned.played == len(planned.parts):
        return 0
    (record,) = planned.records.values()
    size = 0
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        if before.rank == after.rank:
            continue
        slots = [slot_of(value) for value in record.boundaries[after.first]]
        if after.rank == rank:
            size += sum(slot.nbytes for slot in slots)
        if before.rank == rank:
            size += sum(slot.nbytes for slot in slots if slot.requires_grad)
    played, needed = planned.scheduled
    return (needed - played) * size


def with_buffers(report: PeakReport, size: int) -> PeakReport:
    """Returns a peak with so many bytes more that live all the time.

    Args:
        report: The peak of what was played.
        size: Bytes of communication buffers.
    """
    if not size:
        return report
    categories = dict(report.categories)
    categories[Category.COMMUNICATION] = categories.get(Category.COMMUNICATION, 0) + size
    return replace(report, peak=Peak(size=report.peak.size + size, phase=report.peak.phase), categories=categories)
