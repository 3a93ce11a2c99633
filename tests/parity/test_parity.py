"""A named subset of the table: every model, ZeRO stage, precision and accumulation at least once."""

from __future__ import annotations

import pytest
import torch

from lightning_3d.config.schema import SCHEDULES
from tests.marks import more
from tests.parity.models import MODELS
from tests.parity.pipeline_models import PIPELINE_MODELS
from tests.parity.pipeline_table import PipelineRow, quick_pipeline_rows
from tests.parity.run import Prover, record
from tests.parity.table import ACCUMULATE, PRECISIONS, ZERO, Row, quick_rows
from tests.parity.tensor_models import TENSOR_MODELS
from tests.parity.tensor_table import TensorRow, quick_tensor_rows


@pytest.fixture(scope="module")
def prover() -> Prover:
    return Prover()


# Of the two axes whose rows take long, one in four; the others are left to thorough runs.
ROWS = [
    *quick_rows(),
    *(
        more(row) if index % 4 else row
        for rows in (quick_tensor_rows(), quick_pipeline_rows())
        for index, row in enumerate(rows)
    ),
]


@pytest.mark.spmd
@pytest.mark.parity
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_equals_one_device(row: Row | TensorRow | PipelineRow, prover: Prover) -> None:
    result = prover.prove(row)
    assert result.equal, f"{result.difference}\nbounds: {result.bounds}"


def test_subset_covers_every_value() -> None:
    rows = list(quick_rows())
    assert {row.model for row in rows} == set(MODELS)
    assert {row.zero for row in rows} == set(ZERO)
    assert {row.precision for row in rows} == set(PRECISIONS)
    assert {row.accumulate for row in rows} == set(ACCUMULATE)
    assert {row.model for row in quick_tensor_rows()} == set(TENSOR_MODELS)
    assert {row.model for row in quick_pipeline_rows()} == set(PIPELINE_MODELS)
    assert {row.schedule for row in quick_pipeline_rows()} == set(SCHEDULES)


@pytest.mark.spmd
@pytest.mark.parity
@pytest.mark.parametrize(("accumulate", "stages"), [more(1, ("1", "2", "3")), (4, ("2", "3"))])
def test_stages_with_the_same_arithmetic_are_equal_to_the_bit(accumulate: int, stages: tuple[str, ...]) -> None:
    rows = [Row(model="HF Llama", zero=zero, accumulate=accumulate, precision="bf16-master") for zero in stages]
    first, *others = (record(row, row.world) for row in rows)
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.parameters[name], first.parameters[name]) for name in first.parameters)
