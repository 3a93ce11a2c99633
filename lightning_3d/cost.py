"""What a plan costs: bytes that live on a rank, and bytes that it sends. Values that add up, printed as tables."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_3d.units import format_bytes
from lightning_3d.wire import HEAD, row_text, wire_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes that live on one rank at one moment, by what they are for.

    Attributes:
        parameters: What the optimizer updates: a shard, or the whole.
        gathered_parameters: Whole copies that the computation reads.
        gradients: In the layout of the parameters.
        gathered_gradients: Whole ones, before they are reduced and scattered.
        optimizer: The optimizer's state.
    """

    parameters: int = 0
    gathered_parameters: int = 0
    gradients: int = 0
    gathered_gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(**{kind.name: getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(self)})

    def __str__(self) -> str:
        sizes = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        return "\n".join(
            f"{kind:<20} {format_bytes(size):>12}" for kind, size in {**sizes, "total": self.total}.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficRow:
    """All calls of one operation over one axis.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, or one that sends its payload once.
        axis: Name of the mesh axis.
        group_size: Ranks in the group.
        calls: Number of calls.
        payload: Bytes of the whole tensors: gathered, or before they are scattered.
    """

    operation: str
    axis: str
    group_size: int
    calls: int
    payload: int

    @property
    def wire(self) -> float:
        """Bytes that one rank sends, in a ring of the group."""
        return self.payload * wire_factor(self.operation, self.group_size)

    def __str__(self) -> str:
        return row_text(self.operation, self.axis, self.group_size, self.calls, self.payload, self.wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one rank communicates, one row per operation and axis.

    Attributes:
        rows: The rows.
    """

    rows: tuple[TrafficRow, ...] = ()

    @property
    def wire(self) -> float:
        """Bytes that one rank sends in all."""
        return sum(row.wire for row in self.rows)

    def __add__(self, other: Traffic) -> Traffic:
        merged: dict[tuple[str, str, int], TrafficRow] = {}
        for row in (*self.rows, *other.rows):
            key = row.operation, row.axis, row.group_size
            known = merged.get(key)
            merged[key] = TrafficRow(
                operation=row.operation,
                axis=row.axis,
                group_size=row.group_size,
                calls=row.calls + (known.calls if known else 0),
                payload=row.payload + (known.payload if known else 0),
            )
        return Traffic(rows=tuple(merged.values()))

    def __str__(self) -> str:
        return "\n".join([HEAD, *map(str, self.rows)])
