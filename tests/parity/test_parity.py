"""A named subset of the table: every model, ZeRO stage, precision and accumulation at least once."""

from __future__ import annotations

import pytest

from tests.parity.models import MODELS
from tests.parity.run import Prover
from tests.parity.table import ACCUMULATE, PRECISIONS, ZERO, Row, quick_rows


@pytest.fixture(scope="module")
def prover() -> Prover:
    return Prover()


@pytest.mark.spmd
@pytest.mark.parity
@pytest.mark.parametrize("row", list(quick_rows()), ids=str)
def test_row_equals_one_device(row: Row, prover: Prover) -> None:
    result = prover.prove(row)
    assert result.equal, f"{result.difference}\nbounds: {result.bounds}"


def test_subset_covers_every_value() -> None:
    rows = list(quick_rows())
    assert {row.model for row in rows} == set(MODELS)
    assert {row.zero for row in rows} == set(ZERO)
    assert {row.precision for row in rows} == set(PRECISIONS)
    assert {row.accumulate for row in rows} == set(ACCUMULATE)
