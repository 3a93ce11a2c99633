"""Plans are made where the module will run, before it is there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_plan_does_not_depend_on_the_device() -> None:
    # A process of its own: what is registered with torch stays.
    command = [sys.executable, "-m", "tests.unit.plan.accelerator"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if " plan, left on " in line]
    assert len(lines) == 6
    assert all(line.endswith("the same plan, left on {'cpu'}") for line in lines), lines
