from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.run.agreement import check_record, digest

PLAN = PipelinePlan(
    schedule="1f1b",
    ranks=2,
    blocks=("b.0", "b.1"),
    stages=(Stage(index=0, rank=0, first=0, end=1), Stage(index=1, rank=1, first=1, end=2)),
    holders={"w": (0,), "v": (0, 1)},
    modules={"b.0": (0,), "b.1": (1,), "norm": (1,)},
    boundaries=((), ()),
)
RECORD = StepRecord(
    blocks=("b.0", "b.1"),
    calls=(),
    boundaries=((), ()),
    parameters={"w": frozenset({0, 1}), "v": frozenset({1, 2})},
    modules={"b.0": frozenset({1}), "b.1": frozenset({2}), "norm": frozenset({2})},
)


def test_a_step_that_fits_the_plan_is_taken() -> None:
    check_record(RECORD, PLAN)
    check_record(replace(RECORD, parameters={}, modules={}), PLAN)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": ("b.1", "b.0")}, r"calls b\.1 where it called b\.0"),
        ({"modules": {"norm": frozenset({0})}}, r"calls norm on stage 0, and the plan put it on stage 1,"),
        ({"parameters": {"w": frozenset({2})}}, r"uses w on stage 1, and the plan put it on stage 0,"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        check_record(replace(RECORD, **change), PLAN)  # type: ignore[arg-type]


def test_digests_tell_records_apart_and_know_no_order_of_names() -> None:
    turned = replace(RECORD, parameters=dict(reversed(RECORD.parameters.items())))
    assert digest(turned) == digest(RECORD)
    assert digest(replace(RECORD, blocks=("b.1", "b.0"))) != digest(RECORD)
