"""Runs the whole table and writes docs/features.md: ``python -m tests.features.run``."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.features.catalog import GROUPS
from tests.features.here import MESHES, Mesh
from tests.features.table import Feature, Reference, prove

_PAGE = Path(__file__).parents[2] / "docs" / "features.md"
_HEAD = """# Works with

Each cell ran a program on a mesh of gloo processes and the same program with plain Lightning on one device: losses,
weights, logged values, files, whatever the feature gives, were equal on every rank. *refused* is one clear error on
every rank before training begins.

"""


class Table:
    """The cells that have run, and what they have shown.

    Args:
        groups: Features by group.
        meshes: Columns.
    """

    def __init__(self, groups: dict[str, tuple[Feature, ...]], meshes: tuple[Mesh, ...]) -> None:
        self._groups, self._meshes = groups, meshes
        self._cells: dict[tuple[str, str], str] = {}
        self.failed: list[str] = []

    def run(self) -> None:
        """Runs every cell and prints it."""
        reference = Reference()
        for features in self._groups.values():
            for feature in features:
                for mesh in self._meshes:
                    self._cells[feature.name, mesh.name] = self._cell(feature, mesh, reference)

    def _cell(self, feature: Feature, mesh: Mesh, reference: Reference) -> str:
        try:
            prove(feature, mesh, reference)
        except (AssertionError, pytest.fail.Exception) as error:
            print(f"FAIL {feature}, {mesh}: {error}", flush=True)
            self.failed.append(f"{feature}, {mesh}")
            return "**no**"
        print(f"ok   {feature}, {mesh}", flush=True)
        return "refused" if mesh.name in feature.refused else "yes"

    def page(self) -> str:
        """Returns the page."""
        names = [mesh.name for mesh in self._meshes]
        lines = [_HEAD + f"Made by `make features` on {datetime.date.today()} with torch {torch.__version__}."]
        for group, features in self._groups.items():
            lines += ["", f"## {group}", "", f"| feature | {' | '.join(names)} | |", f"|---|{'---|' * len(names)}---|"]
            for feature in features:
                cells = [self._cells[feature.name, name] for name in names]
                lines.append(f"| {feature.name} | {' | '.join(cells)} | {feature.note} |")
        return "\n".join(lines) + "\n"


def main(arguments: Iterable[str]) -> int:
    """Runs the table; returns 1 if a cell is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--feature", help="only features whose name contains this; writes nothing")
    parser.add_argument("--mesh", help="only meshes whose name contains this; writes nothing")
    options = parser.parse_args(list(arguments))
    groups = {
        group: tuple(feature for feature in features if (options.feature or "") in feature.name)
        for group, features in GROUPS.items()
    }
    table = Table(groups, tuple(mesh for mesh in MESHES if (options.mesh or "") in mesh.name))
    table.run()
    if not options.feature and not options.mesh:
        _PAGE.write_text(table.page())
    print(f"{len(table.failed)} cells are not as they should be")
    return int(bool(table.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
