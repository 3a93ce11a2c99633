"""A handful of `tests.faults.matrix`: checkpoints go on with other meshes, twice in a row, within an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import MESHES, Matrix, trips
from tests.marks import more

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.timeout(240),
    # Lightning's notice that checkpoints of other meshes lie in the same folder.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


@pytest.mark.parametrize(
    "trip",
    [
        ("1 x 2 x 2", "data 4, zero 3", "tensor 4"),
        ("2 x 2 x 2", "1", "pipeline 4"),
        more(("tensor 4", "2 x 1 x 2", "2 x 2 x 2")),
    ],
    ids=" to ".join,
)
def test_goes_on_as_if_nothing_had_interrupted_it(trip: tuple[str, str, str], tmp_path: Path) -> None:
    (pair,) = Matrix(tmp_path).run([trip])
    assert pair.equal, pair.hops


def test_every_pair_comes_up_in_both_hops() -> None:
    pairs = {(first, second) for first in MESHES for second in MESHES}
    assert {trip[:2] for trip in trips([*MESHES])} == {trip[1:] for trip in trips([*MESHES])} == pairs
