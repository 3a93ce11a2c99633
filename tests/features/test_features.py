"""A named subset of the table: features on one mesh in turn, and some always on all axes at once."""

from __future__ import annotations

import pytest

from tests.features.catalog import FEATURES
from tests.features.here import MESHES, Mesh
from tests.features.table import Feature, Reference, prove, quick_cells


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
