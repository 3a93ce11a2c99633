"""A job that torchrun starts again goes on from its newest checkpoint by itself, also on fewer ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.contract.sources import ROOT
from tests.marks import more

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(480)]

STEPS, SAMPLES = 10, 96


def started(
    directory: Path, *how: str, dies: str = "", node: Path | None = None, **strategy: Any
) -> subprocess.Popen[str]:
    """Starts an agent of torchrun in the directory of its node; it leads a group of processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *how]
    program = ["-m", "tests.spmd.elastic", str(STEPS), str(directory), dies, json.dumps(strategy)]
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        [*command, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=node,
        start_new_session=True,
    )


def finished(agent: subprocess.Popen[str]) -> str:
    """Returns what an agent and its ranks have said, when they are gone."""
    try:
        output, _ = agent.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        output, _ = agent.communicate()
        raise AssertionError(f"the agent was still there:\n{output}") from None
    return output


def steps_of(directory: Path, rank: int) -> list[dict[str, Any]]:
    """Returns what a rank has noted of its steps, in the order in which it took them."""
    return [json.loads(line) for line in (directory / f"rank-{rank}.steps").read_text().splitlines()]


def undisturbed(directory: Path, **strategy: Any) -> list[float]:
    """Returns the losses of a run that nothing happens to."""
    directory.mkdir()
    agent = started(directory, "--standalone", **strategy)
    output = finished(agent)
    assert agent.returncode == 0, output
    return [step["loss"] for step in steps_of(directory, 0)]


@pytest.mark.parametrize(
    ("rank", "strategy"), [(1, {"pipeline_parallel_size": 2}), more(0, {"zero_stage": 3})], ids=str
)
def test_a_job_that_is_started_again_goes_on_from_its_newest_checkpoint(
    rank: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    directory = tmp_path / "again"
    directory.mkdir()
    agent = started(directory, "--standalone", "--max-restarts=1", dies=f"rank:{rank}:5", **strategy)
    output = finished(agent)
    assert agent.returncode == 0, output
    assert "it goes on from step 4, from" in output
    steps = steps_of(directory, 0)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, *range(5, STEPS + 1)]
    expected = undisturbed(tmp_path / "alone", **strategy)
    assert {step["step"]: step["loss"] for step in steps} == dict(enumerate(expected, start=1))


def meeting() -> tuple[str, ...]:
    """How the agents of two nodes find each other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # Users copy such a constant from one job to the next.
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=constant")


@pytest.mark.thorough
def test_nodes_with_disks_of_their_own_go_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    nodes, directory = [tmp_path / "one", tmp_path / "two"], tmp_path / "noted"
    for place in (*nodes, directory):
        place.mkdir()
    how = ("--nnodes=2", "--max-restarts=1", *meeting())
    agents = [started(directory, *how, dies="save:3:6", node=node, pipeline_parallel_size=2) for node in nodes]
    outputs = [finished(agent) for agent in agents]
    # The agent that lends the store may leave before the other one has said goodbye, which that takes for a failure.
    assert 0 in [agent.returncode for agent in agents], "\n".join(outputs)
    assert "it goes on from step 4, from checkpoints/" in "".join(outputs)
    assert (directory / "died").exists()
    left = [sorted(path.name for path in (node / "checkpoints").iterdir()) for node in nodes]
    assert left == [sorted(["last.ckpt", *(f"step={step}.ckpt" for step in range(2, STEPS + 1, 2))])] * 2
    found = {step["step"]: step["loss"] for step in steps_of(directory, 0)}
    assert sorted(found) == list(range(1, STEPS + 1))


@pytest.mark.thorough
def test_a_job_that_loses_a_node_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    patience = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
    elastic = ("--nnodes=1:2", "--max-restarts=2", *meeting(), patience)
    directory = tmp_path / "elastic"
    directory.mkdir()
    agents = [started(directory, *elastic, dies="node:1:5", zero_stage=2) for _ in range(2)]
    outputs = [finished(agent) for agent in agents]
    codes = sorted(agent.returncode for agent in agents)
    assert codes == [-signal.SIGKILL, 0], "\n".join(outputs)
    steps = steps_of(directory, 0)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, *range(5, STEPS + 1)]
    assert [step["world"] for step in steps] == [4] * 5 + [2] * (STEPS - 4)
    # What the checkpoint has seen, and what was seen after it: no sample twice, none never.
    seen = [sample for rank in range(4) for step in steps_of(directory, rank)[:4] for sample in step["seen"]]
    seen += [sample for rank in range(2) for step in steps_of(directory, rank)[5:] for sample in step["seen"]]
    assert max(Counter(seen).values()) == 1
    expected = undisturbed(tmp_path / "alone", zero_stage=2)
    found = {step["step"]: step["loss"] for step in steps}
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-10)
