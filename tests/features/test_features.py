"""A named subset of the table: features on one mesh in turn, and some always on all axes at once."""

from __future__ import annotations

import pytest

from tests.features.catalog import FEATURES, GROUPS
from tests.features.here import MESHES, Mesh
from tests.features.page import PAGE, README, REFUSED, YES, rows, with_summary
from tests.features.table import Feature, Reference, prove, quick_cells

# Lightning's advice against what some rows do, which one device is given too.
_ADVICE = (
    "You defined a `validation_step` but have no `val_dataloader`",
    "Your `.*_dataloader`'s sampler has shuffling enabled",
    "Your `IterableDataset` has `__len__` defined",
    "Be aware that when using `ckpt_path`",
    "Trying to infer the `batch_size` from an ambiguous collection",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}:UserWarning") for text in _ADVICE]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.mark.spmd
@pytest.mark.parametrize(("feature", "mesh"), quick_cells(FEATURES), ids=str)
def test_feature_is_as_on_one_device(feature: Feature, mesh: Mesh, reference: Reference) -> None:
    prove(feature, mesh, reference)


def test_names_are_different_and_refusals_name_meshes() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    for feature in FEATURES:
        assert feature.refused.keys() <= {mesh.name for mesh in MESHES}


def test_the_page_has_every_cell_and_readme_its_summary() -> None:
    found = {(group, feature): cells for group, feature, cells in rows(PAGE.read_text()) if feature != "feature"}
    expected = {
        (group, feature.name): [REFUSED if mesh.name in feature.refused else YES for mesh in MESHES]
        for group, features in GROUPS.items()
        for feature in features
    }
    assert found == expected
    assert with_summary(README.read_text(), PAGE.read_text()) == README.read_text()
