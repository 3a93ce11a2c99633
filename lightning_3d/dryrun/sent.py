"""What a rank sends in a step of all micro-batches, of which some were played."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.counters import CollectiveCounter, CollectiveRow, CollectiveTable
from lightning_3d.dryrun.memory import is_vote
from lightning_3d.dryrun.planned import Planned

_Key = tuple[str, str]
# Between stages, where no micro-batch computes.
_BETWEEN = ("send", "receive", "send_receive")


class SentByMicrobatch:
    """Counts the collectives of a step, and those of one micro-batch in its middle, for which others count.

    Attributes:
        counter: To be entered around a step.

    Args:
        mesh: Names the axes.
        planned: The training and its plan.
    """

    def __init__(self, mesh: DeviceMesh, planned: Planned) -> None:
        self.counter = _WithoutVotes(mesh)
        self._planned = planned
        self._middle = planned.played // 2
        self._in_middle: dict[_Key, CollectiveRow] = {}

    @contextmanager
    def during(self, microbatch: int | None) -> Iterator[None]:
        """Context of a computation for a micro-batch, or for none."""
        before = self.counter.table
        yield
        if microbatch == self._middle:
            for key, row in _by_key(_difference(self.counter.table, before)).items():
                known = self._in_middle.get(key)
                self._in_middle[key] = row if known is None else _scaled_sum(known, row, 1)

    def of_all(self) -> CollectiveTable:
        """Returns the collectives of a step of all micro-batches, those of its batches together."""
        planned = self._planned
        missing = len(planned.parts) - planned.played
        if not missing:
            return self.counter.table
        played, needed = planned.scheduled
        rows = []
        for row in self.counter.table.rows:
            if row.operation in _BETWEEN:
                rows.append(_times(row, needed / played))
            else:
                middle = self._in_middle.get((row.operation, row.axis))
                rows.append(row if middle is None else _scaled_sum(row, middle, missing))
        return CollectiveTable(rows=tuple(rows))


class _WithoutVotes(CollectiveCounter):
    """Counts no votes, by which stages ask each other in the first step alone whether their shapes are known."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts it if it is a collective of every step."""
        if is_vote(func, args):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _by_key(rows: Iterable[CollectiveRow]) -> dict[_Key, CollectiveRow]:
    return {(row.operation, row.axis): row for row in rows}


def _difference(after: CollectiveTable, before: CollectiveTable) -> list[CollectiveRow]:
    known = _by_key(before.rows)
    rows = []
    for row in after.rows:
        old = known.get((row.operation, row.axis))
        rows.append(row if old is None else _scaled_sum(row, old, -1))
    return [row for row in rows if row.calls]


def _scaled_sum(one: CollectiveRow, other: CollectiveRow, times: int) -> CollectiveRow:
    return replace(
        one,
        calls=one.calls + times * other.calls,
        payload=one.payload + times * other.payload,
        wire=one.wire + times * other.wire,
    )


def _times(row: CollectiveRow, factor: float) -> CollectiveRow:
    return replace(row, calls=round(row.calls * factor), payload=round(row.payload * factor), wire=row.wire * factor)
