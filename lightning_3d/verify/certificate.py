"""The certificate: what was run, what was compared and how far it is off, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_3d.units import counted, format_count, format_seconds
from lightning_3d.verify.comparison import NEEDED, Check

_WIDTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What was run.

    Attributes:
        module: Class of the module, or the name of the run.
        shrunk: What was left out of its stacks.
        parameters: Elements of the parameters that were trained.
        mesh: The mesh in words.
        options: Options of the strategy that are not the default's.
        microbatches: Micro-batches of a batch: on each data rank, and on one device.
        steps: Optimizer steps and batches of each.
        precision: Name of the precision.
        trainer: Further arguments of the Trainer.
        seed: Of every generator.
    """

    module: str
    shrunk: tuple[str, ...]
    parameters: int
    mesh: str
    options: Mapping[str, Any]
    microbatches: tuple[int, int]
    steps: tuple[int, int]
    precision: str
    trainer: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a difference comes from, as far as it was found.

    Attributes:
        axes: The fewest axes on which it shows; None if it shows on one device already.
        facts: What was found, in order.
        advice: What to try, in order.
    """

    axes: tuple[str, ...] | None
    facts: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Whether a training on a mesh is the training of one device, and how that was found.

    Attributes:
        setting: What was run.
        repeats: Whether one device gives the same bits twice; if not, what differs.
        checks: What was compared.
        bounds: Where the bounds come from.
        random: What is known of random numbers.
        plan: Hash of the plan of the mesh.
        notes: What a reader should know besides.
        not_compared: What was not looked at.
        place: Where a difference comes from; None if there is none.
        versions: Of Python and packages.
        seconds: Time that it took.
    """

    setting: Setting
    repeats: str = ""
    checks: tuple[Check, ...] = ()
    bounds: str = ""
    random: str = ""
    plan: str = ""
    notes: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    place: Place | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal, and what is needed for a proof was compared."""
        compared = {check.kind for check in self.checks if check.compared}
        enough = compared.issuperset(NEEDED) and bool(compared & {"loss", "logged values"})
        return not self.repeats and enough and all(check.equal for check in self.checks if check.compared)

    def __str__(self) -> str:
        lines = [self._verdict(), ""]
        lines += _rows(self._setting())
        lines += ["", *self._table()] if self.checks else []
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        if self.place is not None:
            lines += ["", *self._place(self.place)]
        missing = [*(f"{check.kind}: {check.reason}" for check in self.checks if not check.compared)]
        missing += self.not_compared
        lines += ["", "not compared:", *(f"  {each}" for each in missing)] if missing else []
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines += ["", *_rows([("plan", self.plan or "none"), ("versions", versions)])]
        lines += _rows([("took", format_seconds(self.seconds))])
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain values; infinite errors are the text ``"inf"``."""
        return {
            "equal": self.equal,
            "setting": asdict(self.setting),
            "repeats": self.repeats,
            "bounds": self.bounds,
            "checks": [_check(check) for check in self.checks],
            "random": self.random,
            "notes": list(self.notes),
            "not_compared": list(self.not_compared),
            "place": None if self.place is None else asdict(self.place),
            "plan": self.plan,
            "versions": dict(self.versions),
            "seconds": self.seconds,
        }

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Writes ``certificate.txt`` and ``certificate.json`` into a directory, and returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        text, data = directory / "certificate.txt", directory / "certificate.json"
        text.write_text(f"{self}\n")
        data.write_text(json.dumps(self.as_dict(), indent=2, default=str) + "\n")
        return text, data

    def _verdict(self) -> str:
        module, mesh = self.setting.module, self.setting.mesh
        if self.equal:
            return f"EQUAL in all that was compared: {module} on {mesh} and on one device"
        if self.repeats:
            return f"NOT EQUAL: {module} is not deterministic on one device, so no mesh can be compared with it"
        if self.place is not None and not self.checks:
            return f"FAILED: {module} runs on one device, but not on {mesh}"
        if any(check.wrong for check in self.checks):
            return f"NOT EQUAL: {module} on {mesh} and on one device"
        return f"NOT SHOWN: too little of {module} could be compared on {mesh}"

    def _setting(self) -> list[tuple[str, str]]:
        of = self.setting
        options = ", ".join(f"{name}={value}" for name, value in of.options.items())
        trainer = ", ".join(f"{name}={value}" for name, value in of.trainer.items())
        steps, batches = of.steps
        each = "" if batches == 1 else f" of {batches} batches"
        return [
            ("module", f"{of.module}, {format_count(of.parameters)} parameters trained"),
            *(("shrunk", each) for each in of.shrunk),
            ("mesh", of.mesh),
            ("strategy", options),
            ("reference", f"the same strategy on one device, the same {of.microbatches[1]} micro-batches a batch"),
            ("steps", f"{counted(steps, 'optimizer step')}{each}" + (f"; {trainer}" if trainer else "")),
            ("precision", of.precision),
            *([("repeated", "one device twice: the same bits")] if self.checks and not self.repeats else []),
            *([("repeated", f"one device twice: {self.repeats}")] if self.repeats else []),
            *([("random", self.random)] if self.random else []),
            *([("bounds", self.bounds)] if self.bounds else []),
        ]

    def _table(self) -> list[str]:
        head = ("", "compared", "largest error", "bound", "where")
        body = [head, *(_row(check) for check in self.checks if check.compared)]
        widths = [max(len(row[column]) for row in body) for column in range(len(head))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body]

    @staticmethod
    def _place(place: Place) -> list[str]:
        where = "one device" if place.axes is None else " x ".join(place.axes) or "unknown"
        lines = [f"where it comes from: {where}", *(f"  {fact}" for fact in place.facts)]
        return lines + (["what to try:", *(f"  {each}" for each in place.advice)] if place.advice else [])


def _row(check: Check) -> tuple[str, ...]:
    worst = check.worst
    assert worst is not None
    verdict = worst.place if check.equal else f"{worst.place}   <-- {len(check.wrong)} of {check.compared} differ"
    bound = "the same bits" if check.bound == 0 else f"{check.bound:.0e}"
    return (check.kind, str(check.compared), f"{worst.error:.1e}", bound, verdict)


def _rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:<{_WIDTH}}{text}" for name, text in pairs]


def _check(check: Check) -> dict[str, Any]:
    worst = check.worst
    return {
        "kind": check.kind,
        "compared": check.compared,
        "equal": check.equal,
        "bound": check.bound,
        "largest_error": None if worst is None else _number(worst.error),
        "where": None if worst is None else worst.place,
        "different": len(check.wrong),
        "reason": check.reason,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
