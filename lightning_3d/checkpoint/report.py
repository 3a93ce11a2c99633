"""What became of a checkpoint that was loaded: restored, converted, edited, missing, not used; part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPart:
    """What became of one part of a checkpoint, by the names of what it holds.

    Attributes:
        name: The part: "weights", "optimizer 0 (AdamW)", "schedulers", ...
        restored: What is as it was saved.
        converted: What is restored in another form, each with the two forms: another dtype, number of ranks, name.
        edited: What hooks have changed before it was loaded.
        missing: What the run has and the checkpoint does not.
        unexpected: What the checkpoint has and the run does not.
    """

    name: str
    restored: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What became of a checkpoint. Its text has a line for each part; :meth:`line` is short.

    Attributes:
        path: Where it lies.
        form: What it is: a directory or a file, and who wrote it.
        saved_on: The mesh that saved it, as far as it says so.
        loaded_on: The mesh that loaded it.
        parts: Its parts, in the order in which they were loaded.
    """

    path: str
    form: str
    saved_on: str
    loaded_on: str
    parts: tuple[LoadedPart, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing was missing, and nothing was left unused."""
        return not any(part.missing or part.unexpected for part in self.parts)

    def part(self, name: str) -> LoadedPart | None:
        """Returns the part whose name begins so; None if there is none."""
        return next((part for part in self.parts if part.name.startswith(name)), None)

    def line(self) -> str:
        """Returns one short message."""
        kinds: dict[str, Callable[[LoadedPart], tuple[str, ...]]] = {
            "converted": lambda part: part.converted,
            "edited by hooks": lambda part: part.edited,
            "missing": lambda part: part.missing,
            "not used": lambda part: part.unexpected,
        }
        restored = [_counted(part.name, part.restored) for part in self.parts if part.restored]
        texts = [f"restored {', '.join(restored) or 'nothing'}"]
        for kind, names in kinds.items():
            found = [f"{part.name} ({_first(names(part))})" for part in self.parts if names(part)]
            texts += [f"{kind}: {', '.join(found)}"] if found else []
        return f"Loaded {self.path}, {self.form} of {self.saved_on}, on {self.loaded_on}: {'; '.join(texts)}"

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.form} of {self.saved_on}, loaded on {self.loaded_on}"]
        for part in self.parts:
            kinds = {
                "restored": part.restored,
                "converted": part.converted,
                "edited": part.edited,
                "missing": part.missing,
                "not used": part.unexpected,
            }
            lines += [f"  {part.name} {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        return "\n".join(lines)


def _counted(name: str, restored: tuple[str, ...]) -> str:
    return f"{name} ({len(restored)})" if len(restored) > 1 else name


def _first(names: tuple[str, ...]) -> str:
    others = len(names) - _SHOWN
    return "; ".join(names[:_SHOWN]) + (f"; {others} more" if others > 0 else "")
