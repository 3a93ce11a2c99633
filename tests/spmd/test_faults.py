"""A rank that fails, vanishes or hangs: all others end soon, and it is said which one it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.marks import more
from tests.spmd.faulty import TIMEOUT

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(240)]

RANKS = 4
PIPELINE = {"pipeline_parallel_size": 2}
ZERO = {"zero_stage": 3}
# Seconds from the event until no rank is left, as promised on a machine that does nothing else; tests share theirs.
PROMISED = {"raise": 5.0, "leave": 10.0, "kill": 10.0, "kill rank 0": 15.0, "hang": 15.0}
_BUSY = 3.0
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program has ended.

    Attributes:
        code: Exit status of what was started.
        output: All that its ranks have said.
        seconds: From the event until the last rank was gone.
    """

    code: int
    output: str
    seconds: float


def ended(end: str, rank: int, directory: Path, strategy: dict[str, Any], *how: str, place: str = "step") -> Ended:
    """Runs the program until no rank is left."""
    command = [sys.executable, "-W", "ignore", *how, "-m", "tests.spmd.faulty"]
    if how:
        command = [sys.executable, *how, "--master-port", str(find_free_network_port()), "-m", "tests.spmd.faulty"]
    arguments = [end, str(rank), place, str(directory), json.dumps(strategy)]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    ) as program:
        try:
            output, _ = program.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    processes = [int(path.read_text()) for path in directory.glob("rank-*")]
    assert len(processes) == RANKS, output
    while any(map(_is_there, processes)):
        time.sleep(0.05)
    time_file = directory / "time"
    began = float(time_file.read_text()) if time_file.exists() else time.time()
    return Ended(code=program.returncode, output=output, seconds=time.time() - began)


def _environment() -> dict[str, str]:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "RANK", "NODE_RANK")
    return {name: value for name, value in os.environ.items() if name not in names}


def _is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", [(), more(*[_TORCHRUN])], ids=["launched", "torchrun"])
@pytest.mark.parametrize(("rank", "strategy"), [(2, PIPELINE), more(0, ZERO)], ids=str)
def test_the_traceback_of_the_rank_that_failed_comes_first(
    rank: int, strategy: dict[str, Any], how: tuple[str, ...], tmp_path: Path
) -> None:
    found = ended("raise", rank, tmp_path, strategy, *how)
    assert found.code != 0
    assert found.seconds < PROMISED["raise"] * _BUSY, found.output
    first = found.output.index("Traceback (most recent call last)")
    told = found.output[: found.output.index("this rank fails on purpose")]
    assert told.count("Traceback") == 1, found.output
    assert f"rank {rank} has failed, last heard in training, epoch 0, batch 3, step 3." in told[:first]
    if how:
        summary = found.output[found.output.rindex("Root Cause") :]
        assert "this rank fails on purpose" in summary, found.output


@pytest.mark.parametrize("how", [(), more(*[_TORCHRUN])], ids=["launched", "torchrun"])
@pytest.mark.parametrize(("rank", "strategy"), [more(2, PIPELINE), (0, ZERO)], ids=str)
def test_a_rank_that_is_killed_is_named_with_its_last_step(
    rank: int, strategy: dict[str, Any], how: tuple[str, ...], tmp_path: Path
) -> None:
    found = ended("kill", rank, tmp_path, strategy, *how)
    assert found.code != 0
    assert found.seconds < PROMISED["kill" if rank else "kill rank 0"] * _BUSY, found.output
    assert f"rank {rank} has vanished" in found.output
    assert "step 3" in found.output
    if how:
        summary = found.output[found.output.rindex("ChildFailedError") :]
        assert "Signal 9 (SIGKILL)" in summary or f"rank {rank} has vanished" in summary, found.output


@pytest.mark.parametrize("end", [more("raise"), more("kill"), "leave"])
def test_ranks_that_wait_for_nobody_end_too(end: str, tmp_path: Path) -> None:
    found = ended(end, 1, tmp_path, ZERO, place="alone")
    assert found.code != 0
    assert found.seconds < PROMISED[end] * _BUSY, found.output
    assert f"rank 1 has {'failed' if end == 'raise' else 'vanished'}" in found.output


@pytest.mark.parametrize(
    ("place", "strategy"),
    [("step", PIPELINE), more("hook", PIPELINE), more("step", {"tensor_parallel_size": 2}), more("step", ZERO)],
    ids=str,
)
def test_a_hang_ends_at_the_time_out_with_the_place_of_every_rank(
    place: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    found = ended("hang", 3, tmp_path, strategy, place=place)
    assert found.code != 0
    assert found.seconds < TIMEOUT + PROMISED["hang"] * _BUSY, found.output
    assert "ranks have waited for each other in vain" in found.output
    # The hook is one of the end of a batch, of which the step is done.
    batch = 2 if place == "hook" else 3
    assert f"rank 3 ends here, in training, epoch 0, batch {batch}, step 3" in found.output


@pytest.mark.parametrize(("place", "doing"), [more("save", "saving"), more("load", "loading")])
def test_a_hang_in_a_checkpoint_is_told_as_such(place: str, doing: str, tmp_path: Path) -> None:
    directory = tmp_path / "hangs"
    directory.mkdir()
    if place == "load":
        ended("ask", 0, tmp_path, PIPELINE)
        (tmp_path / "saved").rename(directory / "before")
    found = ended("hang", 1, directory, PIPELINE, place=place)
    assert found.code != 0
    assert found.seconds < TIMEOUT + PROMISED["hang"] * _BUSY, found.output
    assert "ranks have waited for each other in vain" in found.output
    assert f": {doing} a checkpoint in " in found.output
    assert "rank 1 ends here" in found.output


def test_a_failure_is_told_at_once_where_the_others_are_waited_for_to_save(tmp_path: Path) -> None:
    found = ended("raise and save", 1, tmp_path, PIPELINE, place="alone")
    assert found.code != 0
    assert found.seconds < PROMISED["raise"] * _BUSY, found.output
    assert "No checkpoint is saved at this exception" in found.output
    assert "rank 1 has failed" in found.output
    assert not (tmp_path / "saved").exists() or not [*(tmp_path / "saved").iterdir()]


def test_a_rank_without_memory_ends_all_with_what_to_try(tmp_path: Path) -> None:
    found = ended("memory", 3, tmp_path, {**PIPELINE, "num_microbatches": 2})
    assert found.code != 0
    assert found.seconds < PROMISED["raise"] * _BUSY, found.output
    told = found.output[found.output.index("no memory on purpose") :]
    for step in ("1. num_microbatches=4, now 2", "2. activation_checkpointing='selective'", "3. zero_stage=2, up to 3"):
        assert step in told


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [{"async_save": True, **PIPELINE}, ZERO], ids=str)
def test_sigterm_saves_also_where_no_callback_does(strategy: dict[str, Any], tmp_path: Path) -> None:
    found = ended("ask alone", 1, tmp_path, strategy)
    assert "Traceback" not in found.output, found.output
    saved = tmp_path / "saved" / "sigterm-step=4.ckpt"
    assert f"SIGTERM: saved {saved}" in found.output
    assert torch.load(saved / "meta.pt", weights_only=True)["global_step"] == 4
    again = tmp_path / "again"
    again.mkdir()
    (tmp_path / "saved").rename(again / "before")
    assert ended("none", 1, again, strategy).code == 0


@pytest.mark.parametrize("rank", [more(0), 2])
def test_sigterm_on_any_rank_ends_all_after_the_same_batch_with_a_checkpoint(rank: int, tmp_path: Path) -> None:
    found = ended("ask", rank, tmp_path, PIPELINE)
    assert "Traceback" not in found.output
    (saved,) = (tmp_path / "saved").iterdir()
    stored = torch.load(saved / "meta.pt", weights_only=True)
    assert stored["global_step"] == 4
