"""What ``self.print`` is given inside micro-batches: said once the batch is over, and once if all of them say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class SaidLines:
    """The lines that one micro-batch prints."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *values: Any, sep: str | None = None, end: str | None = None, **options: Any) -> None:
        """Takes the place of ``print``; where it was to be printed to is not kept."""
        text = (" " if sep is None else sep).join(map(str, values))
        self.lines.append(text + ("\n" if end is None else end))


def lines_of_batch(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the lines of all micro-batches; one that is the same in all of them, once.

    Args:
        parts: The lines of each micro-batch.
    """
    if len({len(part) for part in parts}) > 1:
        return tuple(line for part in parts for line in part)
    return tuple(line for same in zip(*parts, strict=True) for line in (same[:1] if len(set(same)) == 1 else same))


def say(speak: Callable[..., None], lines: Sequence[str]) -> None:
    """Prints lines that have their ends.

    Args:
        speak: The module's ``print``.
        lines: What it is to print.
    """
    for line in lines:
        speak(line, end="")
