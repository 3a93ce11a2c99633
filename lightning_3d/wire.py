"""What a rank sends for a collective, by the rule of rings, and how rows of it are printed."""

from __future__ import annotations

from lightning_3d.units import format_bytes

HEAD = f"{'operation':<15} {'axis':<18} {'ranks':>6} {'calls':>7} {'payload':>12} {'sent/rank':>12}"


def wire_factor(operation: str, size: int) -> float:
    """Returns what share of the payload one of some ranks sends, in a ring.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or one that sends its payload
            once: rooted operations, and those between two ranks.
        size: Ranks in the group.
    """
    if size == 1:
        return 0.0
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def row_text(operation: str, axis: str, size: int, calls: int, payload: float, wire: float) -> str:
    """Returns a row under `HEAD`."""
    return f"{operation:<15} {axis:<18} {size:>6} {calls:>7} {format_bytes(payload):>12} {format_bytes(wire):>12}"
