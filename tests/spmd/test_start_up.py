"""A training of 24 layers begins soon: its plan, made by a run without values, and the proof of it."""

from __future__ import annotations

import pytest

from tests.benchmarks.start_up import PLAN_TARGET, STARTS, measure
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(120)]


def test_a_plan_of_24_layers_and_its_proof_take_seconds() -> None:
    ((parts, _, proved),) = run_spmd(measure, 1, STARTS[0].name, process_group=False, timeout=100)
    _, plan, proof, _ = parts
    assert proved
    # Of CPU, which is a quarter of it where nothing else runs.
    assert plan + proof < PLAN_TARGET
