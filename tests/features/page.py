"""The table as a page of the documents, and what README says of it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tests.features.here import Mesh
from tests.features.table import Feature

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
README = ROOT / "README.md"

YES, NO, REFUSED = "yes", "**no**", "refused"
Cells = Mapping[tuple[str, str], str]

_HEAD = """# Works with

Each cell ran a program on a mesh of gloo processes and the same program with plain Lightning on one device: losses,
weights, logged values, files, whatever the feature gives, were equal on every rank. *refused* is one clear error on
every rank before training begins.

"""
_SECTION = re.compile(r"(?<=\n## Works with\n\n).*?(?=\n\n## )", re.DOTALL)


def page(groups: Mapping[str, tuple[Feature, ...]], meshes: tuple[Mesh, ...], cells: Cells) -> str:
    """Returns the page of a whole run.

    Args:
        groups: Features by group.
        meshes: Columns.
        cells: What came out, by the names of feature and mesh.
    """
    names = [mesh.name for mesh in meshes]
    lines = [_HEAD + f"Made by `make features` on {datetime.date.today()} with torch {torch.__version__}."]
    for group, features in groups.items():
        lines += ["", f"## {group}", "", f"| feature | {' | '.join(names)} | |", f"|---|{'---|' * len(names)}---|"]
        for feature in features:
            found = [cells[feature.name, name] for name in names]
            lines.append(f"| {feature.name} | {' | '.join(found)} | {feature.note} |")
    return "\n".join(lines) + "\n"


def rows(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields group, feature and cells of each row of a page, and its heads as the feature "feature"."""
    group = ""
    for line in text.splitlines():
        group = line.removeprefix("## ") if line.startswith("## ") else group
        if line.startswith("| "):
            feature, *cells, _ = line.strip("|").split(" | ")
            yield group, feature.strip(), cells


def summary(text: str) -> str:
    """Returns what README says of a page: how many features work on each mesh, by group, and which are refused."""
    heads: list[str] = []
    counts: dict[str, list[int]] = {}
    refused: list[str] = []
    for group, feature, cells in rows(text):
        if feature == "feature":
            heads = cells
            counts[group] = [0] * (len(cells) + 1)
            continue
        counts[group][0] += 1
        for index, cell in enumerate(cells, start=1):
            counts[group][index] += cell == YES
        where = [head for head, cell in zip(heads, cells, strict=True) if cell == REFUSED]
        if where:
            refused.append(f"- {feature}: " + ("everywhere" if where == heads else "; ".join(where)))
    table = [f"| | features | {' | '.join(heads)} |", f"|---|{'---|' * (len(heads) + 1)}"]
    table += [f"| {group} | {' | '.join(map(str, numbers))} |" for group, numbers in counts.items()]
    return "\n".join(
        [
            "How many of Lightning's features give on a mesh what they give on one device, each proved by a program",
            "that runs on both ([feature by feature](docs/features.md), made by `make features`):",
            "",
            *table,
            "",
            "The others are refused, with one error that says what to do instead:",
            "",
            *refused,
        ]
    )


def with_summary(readme: str, text: str) -> str:
    """Returns README with the summary of a page in its section."""
    found, count = _SECTION.subn(lambda _: summary(text), readme)
    assert count == 1, "README has one section 'Works with', and another one after it"
    return found
