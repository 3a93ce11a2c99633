"""One rank of a job is killed at a random moment: how long the others take to end, and what checkpoints are left."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.faults.program import DIGESTS, EVERY, FOLDER, LOAD, SAVE, STEP, Job, load, run_rank
from tests.spmd.pool import end_processes

# Seconds until no rank is left, by whether rank 0 was killed, on a machine that does nothing else.
PROMISED = {True: 15.0, False: 10.0}
# Tests share their machine.
BUSY = 3.0
_LONGEST = 90.0
_REFERENCE_STEPS = 8
_ENDLESS = 100
_RESUMED_AT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """A small mesh.

    Attributes:
        world: Its ranks.
        strategy: Options of the strategy.
        nodes: Nodes that have a disk each.
    """

    world: int
    strategy: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1

    def __str__(self) -> str:
        pipeline, tensor = (self.strategy.get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor"))
        zero = self.strategy.get("zero_stage", 1)
        disks = f", {self.nodes} disks" if self.nodes > 1 else ""
        return f"{self.world // (pipeline * tensor)} x {pipeline} x {tensor}, ZeRO {zero}{disks}"


_PIPELINE, _TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
MESHES = (
    Mesh(world=2, strategy={"zero_stage": 3}),
    Mesh(world=2, strategy=_PIPELINE),
    Mesh(world=2, strategy=_TENSOR),
    Mesh(world=4, strategy={**_PIPELINE, "zero_stage": 1}),
    Mesh(world=4, strategy={**_TENSOR, "zero_stage": 2}),
)
NODES = replace(MESHES[3], nodes=2)
BACKGROUND = "async save"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is done to a job.

    Attributes:
        mesh: Where it runs.
        doing: What the killed rank is doing.
        rank: The rank that is killed.
    """

    mesh: Mesh
    doing: str
    rank: int

    def __str__(self) -> str:
        return f"{self.mesh}: rank {self.rank} in {self.doing}"


def all_trials() -> Iterator[Trial]:
    """Yields sixty trials: every rank of every mesh, at everything that it does."""
    for mesh in MESHES:
        for doing in (STEP, SAVE, BACKGROUND, LOAD):
            yield from (Trial(mesh=mesh, doing=doing, rank=rank) for rank in range(mesh.world))
    yield from (Trial(mesh=NODES, doing=SAVE, rank=rank) for rank in range(NODES.world))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of a job.

    Attributes:
        trial: What was done to it.
        moment: Where the killed rank was: "12 ms into the save of last.ckpt".
        seconds: From the kill until no rank was left.
        codes: How the other ranks have ended.
        told: Whether each of them has said which rank vanished.
        newest: The newest complete checkpoint of each node, with its step; None where there is none.
        equal: Whether every checkpoint of each node is the whole of the step that it tells.
    """

    trial: Trial
    moment: str
    seconds: float
    codes: tuple[int | None, ...]
    told: bool
    newest: tuple[tuple[str, int] | None, ...]
    equal: bool

    @property
    def limit(self) -> float:
        """Seconds within which no rank may be left."""
        return PROMISED[self.trial.rank == 0] * BUSY

    @property
    def good(self) -> bool:
        """Whether all is as promised."""
        ended = self.seconds < self.limit and all(self.codes) and self.told
        return ended and self.equal and None not in self.newest


class Harness:
    """Runs trials; the undisturbed run of each mesh once.

    Args:
        directory: Where the jobs write.
        seed: Of the moments.
    """

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._references: dict[str, tuple[Path, dict[int, str], dict[str, float]]] = {}
        self._context = multiprocessing.get_context("forkserver")
        # Imported once, in the process that ranks are forked from.
        self._context.set_forkserver_preload(["tests.faults.program", "torch.distributed.fsdp", "pytest"])
        self._count = 0

    def run(self, trial: Trial) -> Finding:
        """Runs a trial."""
        _, digests, seconds = self._reference(trial.mesh)
        job = self.job(trial.mesh, background=trial.doing == BACKGROUND)
        if trial.doing == LOAD:
            job = replace(job, resume=f"{FOLDER}/step={_RESUMED_AT}.ckpt")
            self._copy_reference(trial.mesh, job)
        what = SAVE if trial.doing == BACKGROUND else trial.doing
        # A save in the background goes on for about as long again.
        longest = seconds[what] * (2 if trial.doing == BACKGROUND else 1)
        after, delay = self._random.choice(_begins(what)), self._random.uniform(0, longest)
        processes = self._started(job)
        try:
            begun = _wait_for(job.marks(trial.rank), what, after, processes)
            time.sleep(max(0.0, begun["at"] + delay - time.time()))
            killed = time.time()
            os.kill(processes[trial.rank].pid, signal.SIGKILL)
            _wait_until_gone(processes)
            ended = time.time() - killed
        finally:
            codes = _end(processes)
        others = [rank for rank in range(job.world) if rank != trial.rank]
        newest, equal = _left(job, digests)
        return Finding(
            trial=trial,
            moment=f"{1000 * (killed - begun['at']):.0f} ms into {_named(what, begun['of'])}",
            seconds=ended,
            codes=tuple(codes[rank] for rank in others),
            told=all(f"rank {trial.rank} has vanished" in job.output(rank).read_text() for rank in others),
            newest=newest,
            equal=equal,
        )

    def codes(self, job: Job) -> list[int | None]:
        """Runs a job and returns how its ranks have ended."""
        processes = self._started(job)
        try:
            _wait_until_gone(processes)
        finally:
            codes = _end(processes)
        return codes

    def finish(self, job: Job) -> None:
        """Runs a job that nothing happens to."""
        codes = self.codes(job)
        assert not any(codes), f"the undisturbed run has ended with {codes}:\n{job.output(0).read_text()}"

    def close(self) -> None:
        """Ends the process that ranks are forked from."""
        end_processes()

    def _reference(self, mesh: Mesh) -> tuple[Path, dict[int, str], dict[str, float]]:
        """Where an undisturbed run has written, what it had after each step, and how long it took for what it did."""
        alone = replace(mesh, nodes=1)
        if str(alone) not in self._references:
            job = replace(self.job(alone), steps=_REFERENCE_STEPS, recorded=True)
            self.finish(job)
            resumed = replace(self.job(alone), steps=_REFERENCE_STEPS, resume=f"{FOLDER}/step={_RESUMED_AT}.ckpt")
            _copy(job.node(0), resumed.node(0))
            self.finish(resumed)
            digests = {int(step): found for step, found in json.loads((job.directory / DIGESTS).read_text()).items()}
            seconds = _durations(job.marks(0)) | {LOAD: _durations(resumed.marks(0))[LOAD]}
            self._references[str(alone)] = job.node(0), digests, seconds
        return self._references[str(alone)]

    def _copy_reference(self, mesh: Mesh, job: Job) -> None:
        source, _, _ = self._reference(mesh)
        _copy(source, job.node(0))

    def job(self, mesh: Mesh, *, background: bool = False) -> Job:
        """Returns a job that trains on and on in a directory of its own."""
        self._count += 1
        directory = self._directory / f"job-{self._count}"
        directory.mkdir(parents=True)
        return Job(
            world=mesh.world,
            strategy={**mesh.strategy, "async_save": background},
            directory=directory,
            port=find_free_network_port(),
            steps=_ENDLESS,
            nodes=mesh.nodes,
        )

    def _started(self, job: Job) -> list[Any]:
        processes = [self._context.Process(target=run_rank, args=(rank, job)) for rank in range(job.world)]
        for process in processes:
            process.start()
        return processes


def _begins(what: str) -> range:
    """Which of the times that a rank begins something it may be killed at; an earlier checkpoint is there by then."""
    return {LOAD: range(1), SAVE: range(2, 6), STEP: range(EVERY, 6)}[what]


def _named(what: str, of: str) -> str:
    return f"the {what} of {of}" if what in (SAVE, LOAD) else f"{what} {of}"


def _wait_for(marks: Path, what: str, after: int, processes: list[Any]) -> dict[str, Any]:
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end and all(process.is_alive() for process in processes):
        begun = [mark for mark in _read(marks) if mark["what"] == what and not mark["end"]]
        if len(begun) > after:
            return begun[after]
        time.sleep(0.002)
    raise AssertionError(f"the job has not come to {what} number {after}")


def _read(marks: Path) -> list[dict[str, Any]]:
    if not marks.exists():
        return []
    # The last line may be half written.
    return [json.loads(line) for line in marks.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _durations(marks: Path) -> dict[str, float]:
    """Returns the median seconds of everything that a rank has done to its end."""
    found: dict[str, list[float]] = {}
    begun: dict[str, float] = {}
    for mark in _read(marks):
        if mark["end"]:
            found.setdefault(mark["what"], []).append(mark["at"] - begun[mark["what"]])
        else:
            begun[mark["what"]] = mark["at"]
    return {what: statistics.median(seconds) for what, seconds in found.items()}


def _wait_until_gone(processes: list[Any]) -> None:
    waiting, end = {process.sentinel for process in processes}, time.monotonic() + _LONGEST
    while waiting and time.monotonic() < end:
        waiting -= set(wait(list(waiting), timeout=1.0))


def _end(processes: list[Any]) -> list[int | None]:
    """Returns the exit codes; those that run still are killed, and have None."""
    codes = [process.exitcode for process in processes]
    for process in processes:
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                end(process.pid, signal.SIGKILL)
        process.join()
    return codes


def _left(job: Job, digests: Mapping[int, str]) -> tuple[tuple[tuple[str, int] | None, ...], bool]:
    """Loads every checkpoint of a job; returns each node's newest, and whether all equal what was recorded."""
    newest: list[tuple[str, int] | None] = []
    equal = True
    for number in range(job.nodes):
        found = sorted((job.directory / f"node-{number}" / FOLDER).glob("*.ckpt"))
        steps: dict[str, int] = {}
        for checkpoint in found:
            steps[checkpoint.name], content = load(checkpoint)
            name = checkpoint.stem.partition("=")[2]
            equal = equal and content == digests[steps[checkpoint.name]]
            equal = equal and (not name or steps[checkpoint.name] == int(name))
        newest.append(max(steps.items(), key=lambda entry: (entry[1], entry[0]), default=None))
    return tuple(newest), equal


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
