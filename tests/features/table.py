"""The table: features by name, what each must do on which mesh, and what came out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.features.compare import assert_alike
from tests.features.here import MESHES, ONE_DEVICE, Here, Mesh
from tests.marks import more
from tests.spmd.pool import SpmdError, run_spmd

Seen = Mapping[str, Any]
Program = Callable[[Here], Seen]

_SECONDS = 100
_EVERY = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """A row of the table.

    Attributes:
        name: What users call it.
        program: Uses the feature, and returns what must be equal everywhere.
        refused: What the error says on meshes, by name, that rightly refuse the feature.
        always: Meshes on which test runs try it, beside one in turn; see `quick_cells`.
        close: Largest relative difference of numbers.
        options: More arguments of Mesh3DStrategy.
        note: What a reader of the table should know.
    """

    name: str
    program: Program
    refused: Mapping[str, str] = field(default_factory=dict)
    always: tuple[Mesh, ...] = ()
    close: float = 1e-9
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return self.name


class Reference:
    """What features do on one device, each run once."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def of(self, feature: Feature) -> Seen:
        """Returns what one device with plain Lightning shows."""
        if feature.name not in self._seen:
            self._seen[feature.name] = _on_ranks(feature, ONE_DEVICE)[0]
        return self._seen[feature.name]


def prove(feature: Feature, mesh: Mesh, reference: Reference) -> None:
    """Runs a cell of the table.

    Raises:
        AssertionError: The mesh shows something else than one device, or does not refuse what it should.
    """
    if mesh.name in feature.refused:
        _prove_refusal(feature, mesh)
    else:
        assert_alike(_on_ranks(feature, mesh), reference.of(feature), data=mesh.data, close=feature.close)


def _prove_refusal(feature: Feature, mesh: Mesh) -> None:
    expected = feature.refused[mesh.name]
    with pytest.raises(SpmdError) as error:
        _on_ranks(feature, mesh)
    reports = error.value.reports
    for rank, text in reports.items():
        assert re.search(expected, text), f"rank {rank} does not say '{expected}' but\n{text}"
    assert len(reports) == mesh.world, f"{mesh.world - len(reports)} ranks say nothing"


def _on_ranks(feature: Feature, mesh: Mesh) -> list[Seen]:
    with tempfile.TemporaryDirectory() as directory:
        return run_spmd(_run, mesh.world, feature, mesh, Path(directory), timeout=_SECONDS)


def _run(rank: int, world: int, feature: Feature, mesh: Mesh, directory: Path) -> Seen:
    L.seed_everything(5, verbose=False)
    return feature.program(Here(mesh=mesh, rank=rank, directory=directory, options=feature.options))


def quick_cells(features: tuple[Feature, ...]) -> list[Any]:
    """Returns a named subset: every third feature on one mesh in turn, and all on those where they are always tried.

    Three of four of these cells are left to thorough runs.
    """
    in_turn: list[Any] = []
    always: list[Any] = []
    for index, feature in enumerate(features):
        number, rest = divmod(index, _EVERY)
        turn = None if rest else MESHES[number % (len(MESHES) - 1)]
        in_turn += [(feature, turn)] if turn is not None and turn not in feature.always else []
        always += [(feature, mesh) for mesh in feature.always]
    return [more(*cell) if index % 4 else cell for cells in (in_turn, always) for index, cell in enumerate(cells)]
