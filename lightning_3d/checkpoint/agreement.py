"""Steps that every rank takes together: what one rank could not do, every rank reports, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_3d.errors import CheckpointError, Lightning3DError

# What a user can do where a checkpoint cannot be read.
DAMAGED = "load another checkpoint, this one is damaged"

T = TypeVar("T")


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Returns the values of all ranks, in group order.

    Args:
        group: A group of all ranks that save or load together, with a backend for CPU objects; None for one process.
        value: This rank's value, picklable.
    """
    if group is None:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Returns this process' position in ``group``, 0 without one."""
    return 0 if group is None else dist.get_rank(group)


@contextmanager
def together(group: dist.ProcessGroup | None, doing: str, fix: str) -> Iterator[None]:
    """Runs a step on every rank; if it fails on any, every rank raises the same error.

    The step itself must not hold a collective that a failing rank would miss, unless that collective exchanges failures
    itself as torch.distributed.checkpoint does.

    Args:
        group: The ranks that take the step, None for one process.
        doing: What the step does, for the error: "write the checkpoint /runs/last.ckpt".
        fix: What the user can do when it fails.

    Raises:
        CheckpointError: A rank failed; the text names that rank and its cause.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = error
    reports = gather(group, None if failure is None else _report(failure))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed:
        raise _joined(failed, len(reports), doing, fix) from failure


def _report(failure: BaseException) -> Lightning3DError | str:
    if isinstance(failure, Lightning3DError):
        return failure
    if isinstance(failure, CheckpointException):
        return "; ".join(f"rank {rank}: {_named(error)}" for rank, (error, _) in sorted(failure.failures.items()))
    return _named(failure)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _joined(failed: dict[int, Lightning3DError | str], ranks: int, doing: str, fix: str) -> Lightning3DError:
    texts = {str(report) for report in failed.values()}
    first_rank, first = next(iter(failed.items()))
    common = len(failed) == ranks and len(texts) == 1
    if isinstance(first, Lightning3DError):
        fact = first.fact if common else f"rank {first_rank}: {first.fact}"
        return type(first)(fact, valid=first.valid, fix=first.fix)
    cause = first if common else "; ".join(_of_rank(rank, report) for rank, report in failed.items())
    return CheckpointError(f"could not {doing}: {cause}", fix=fix)


def _of_rank(rank: int, report: Lightning3DError | str) -> str:
    text = str(report)
    return text if text.startswith("rank ") else f"rank {rank}: {text}"
