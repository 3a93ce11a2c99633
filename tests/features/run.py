"""Runs the whole table; writes docs/features.md and its summary in README.md: ``python -m tests.features.run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import pytest

from tests.features.catalog import GROUPS
from tests.features.here import MESHES, Mesh
from tests.features.page import NO, PAGE, README, REFUSED, YES, page, with_summary
from tests.features.table import Feature, Reference, prove


class Table:
    """The cells that have run, and what they have shown.

    Attributes:
        cells: What came out, by the names of feature and mesh.
        failed: Cells that are not as they should be.

    Args:
        groups: Features by group.
        meshes: Columns.
    """

    def __init__(self, groups: dict[str, tuple[Feature, ...]], meshes: tuple[Mesh, ...]) -> None:
        self._groups, self._meshes = groups, meshes
        self.cells: dict[tuple[str, str], str] = {}
        self.failed: list[str] = []

    def run(self) -> None:
        """Runs every cell and prints it."""
        reference = Reference()
        for features in self._groups.values():
            for feature in features:
                for mesh in self._meshes:
                    self.cells[feature.name, mesh.name] = self._cell(feature, mesh, reference)

    def _cell(self, feature: Feature, mesh: Mesh, reference: Reference) -> str:
        try:
            prove(feature, mesh, reference)
        except (AssertionError, pytest.fail.Exception) as error:
            print(f"FAIL {feature}, {mesh}: {error}", flush=True)
            self.failed.append(f"{feature}, {mesh}")
            return NO
        print(f"ok   {feature}, {mesh}", flush=True)
        return REFUSED if mesh.name in feature.refused else YES


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
        PAGE.write_text(page(groups, MESHES, table.cells))
        README.write_text(with_summary(README.read_text(), PAGE.read_text()))
    print(f"{len(table.failed)} cells are not as they should be")
    return int(bool(table.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
