"""Names of weights and names in a module: alike but for the attribute that holds the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Matching:
    """How stored names become names in a module.

    Attributes:
        removed: What a stored name begins with and the module's does not.
        added: What the module's name begins with and a stored one does not.
        names: Stored name → name in the module, for all that the module has.
    """

    removed: str
    added: str
    names: Mapping[str, str]

    def __str__(self) -> str:
        if not self.removed and not self.added:
            return "under the same names"
        parts = [f"with {self.removed!r} taken off"] if self.removed else []
        parts += [f"with {self.added!r} put before"] if self.added else []
        return f"{' and '.join(parts)} their names"


def match(stored: Mapping[str, torch.Size], here: Mapping[str, torch.Size]) -> Matching:
    """Finds the one change at the beginning of the names that makes most of them, and of their shapes, agree.

    Args:
        stored: Shapes by stored names.
        here: Shapes by the module's names, in its order; of two places that match alike the first is taken.
    """
    best, best_score = Matching(removed="", added="", names={}), (0, 0)
    for removed in _beginnings(stored):
        tails = {name.removeprefix(removed): name for name in stored if name.startswith(removed)}
        agree = Counter[str]()
        alike = Counter[str]()
        for name, shape in here.items():
            for added, tail in _splits(name):
                if tail in tails:
                    agree[added] += 1
                    alike[added] += stored[tails[tail]] == shape
        for added, count in agree.items():
            if (alike[added], count) > best_score:
                names = {tails[tail]: f"{added}{tail}" for tail in tails if f"{added}{tail}" in here}
                best, best_score = Matching(removed=removed, added=added, names=names), (alike[added], count)
    return best


def common_beginning(names: Iterator[str] | Mapping[str, object]) -> str:
    """Returns the attribute under which all names lie, with its dot; empty if there is none.

    Args:
        names: Dotted names.
    """
    firsts = {name.partition(".")[0] if "." in name else "" for name in names}
    return f"{firsts.pop()}." if len(firsts) == 1 and "" not in firsts else ""


def _beginnings(names: Mapping[str, object]) -> list[str]:
    """Returns nothing at all, and the first parts of the names: what may be too much of them."""
    return ["", *dict.fromkeys(f"{name.partition('.')[0]}." for name in names if "." in name)]


def _splits(name: str) -> Iterator[tuple[str, str]]:
    yield "", name
    for at, letter in enumerate(name):
        if letter == ".":
            yield name[: at + 1], name[at + 1 :]
