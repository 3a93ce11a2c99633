"""Ranks that Python starts from the user's process: in notebooks, and as with ``ddp_spawn``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_3d.strategy.launch.spawning import start_method
from tests.marks import more

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("method", ["auto", more("spawn")])
def test_what_was_trained_comes_back(method: str) -> None:
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.spmd.notebook", method],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
    )
    assert program.returncode == 0, program.stderr[-3000:]
    lines = [line for line in program.stdout.splitlines() if line.startswith(("[", "{"))]
    one, two = json.loads(lines[0])
    assert two["state"] == one["state"]
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
    assert two["tested"] == pytest.approx(one["tested"], rel=1e-9)
    assert two["weights"].keys() == one["weights"].keys()
    for name, values in one["weights"].items():
        assert two["weights"][name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
    if method == "auto":
        # Made in configure_model, by the processes; the one that started them has it too.
        assert {name: len(values) for name, values in json.loads(lines[1]).items()} == {
            name: len(values) for name, values in one["weights"].items()
        }


def test_programs_are_started_again_unless_asked() -> None:
    assert start_method("auto") == "popen"
    assert start_method("spawn") == "spawn"
