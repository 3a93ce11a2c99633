"""Real steps beside predicted ones, in processes that are gone afterwards; and what cannot be tried."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.dryrun.tracing import plan as run
from lightning_3d.errors import MeshError, RunError
from lightning_3d.planner.request import read_request
from lightning_3d.planner.trial import _run, _training_words, run_trials

TINY = (
    "recipe=demo",
    "num_devices=2",
    "data=mock",
    "~data.length",
    "~data.max_bytes",
    "data.shapes={input_ids:[33]}",
    "data.limits={input_ids:256}",
    "data.only=input_ids",
    "model.model.max_length=32",
    "model.model.hidden_size=16",
    "model.model.num_layers=2",
    "model.model.num_heads=2",
    "trainer.precision=32-true",
)


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.timeout(300)
def test_real_steps_calibrate_the_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "trial=1", "top=1", "trial_steps=3", "trial_seconds=240", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    (mesh,) = found["trials"]["meshes"]
    assert mesh["failure"] is None
    assert len(mesh["seconds"]) == found["trials"]["steps"] == 3
    assert all(0 < seconds < 60 for seconds in mesh["seconds"])
    best, calibrated = found["best"][0], found["calibrated"][0]
    median = sorted(mesh["seconds"])[1]
    assert calibrated["step_seconds"] == pytest.approx(median)
    assert calibrated["time_scale"] == pytest.approx(median / best["step_seconds"])
    assert calibrated["mesh"] == best["mesh"]
    # A later plan takes the factor without a trial.
    scale = found["trials"]["time_scale"]
    assert run([*TINY, f"cluster.time_scale={scale}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["step_seconds"] == pytest.approx(median)
    assert run([*TINY, f"cluster.time_scale={scale}"]) == 0
    assert "by cluster.time_scale" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["recipe=gpt2_124m"], ["recipe=llama3_405b"]])
def test_a_machine_with_too_few_devices(words: list[str]) -> None:
    with pytest.raises(
        MeshError, match=r"a trial runs on this machine: the meshes have \d+ ranks, and there are 0 GPU"
    ):
        run([*words, "trial=1"])


def test_more_processes_than_a_node_has() -> None:
    with pytest.raises(MeshError, match="16 ranks, and there are 8 processes") as refused:
        run(["recipe=demo", "cluster.nodes=2", "trial=1"])
    assert refused.value.fix == "num_devices=8"


def test_nothing_that_a_trial_started_outlives_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    sleeper = "import time; time.sleep(60)"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {sleeper!r}])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "print('began', flush=True)\n"
        "time.sleep(60)\n"
    )
    assert _run([sys.executable, "-c", code], 5.0, 1) == (None, "began")
    pid = int(child.read_text())
    deadline = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended and that nobody has waited for.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_why_no_training_came_to_its_end() -> None:
    cfg = compose_run([*TINY, "trial=1", "trial_seconds=100"], config_name="plan")
    request = read_request(cfg)
    with pytest.raises(RunError, match="no mesh was tried"):
        run_trials((), request, cfg, [], None)


def test_the_words_of_a_plan_become_those_of_a_training() -> None:
    words = ["recipe=demo", "strategy=3d", "strategy.compile=true", "top=2", "space.schedules=[1f1b]", "+x=1", "seed=3"]
    assert _training_words(words, ["strategy=default", "seed=3"]) == ["recipe=demo", "strategy.compile=true", "+x=1"]
