"""What a check found, and how a list of findings is printed."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class Level(enum.Enum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: ``OK``; ``NOTE``: works, but could be better; ``PROBLEM``: a run fails or is wrong.
        what: The fact, with its numbers.
        fix: What to do, as it would be typed; empty if nothing is to be done.
    """

    level: Level
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    """Returns a finding that asks for nothing."""
    return Finding(Level.OK, what)


def note(what: str, fix: str = "") -> Finding:
    """Returns a finding that a run survives."""
    return Finding(Level.NOTE, what, fix)


def problem(what: str, fix: str) -> Finding:
    """Returns a finding that breaks a run."""
    return Finding(Level.PROBLEM, what, fix)


def table(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines of text, each fix under its finding, the sum at the end."""
    width = max(len(level.value) for level in Level)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:<{width}}  {finding.what}")
        if finding.fix:
            lines.append(f"{'':<{width}}    fix: {finding.fix}")
    counts = Counter(finding.level for finding in findings)
    lines.append("\n" + ", ".join(f"{counts[level]} {level.value}" for level in Level))
    return "\n".join(lines)
