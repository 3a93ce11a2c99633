"""Starts the other local ranks of a job, so that each repeats exactly this job and nothing more."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.strategy.launch.rank_command import hydra_job, rank_command

# What a launch and a seed leave in the environment; the next job in this process must find none of it.
_LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
_SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_SECONDS_TO_FINISH = 60.0
_SECONDS_TO_DIE = 2.0


class Mesh3DLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, made right for Hydra: sweeps, one output directory, any way to start the program.

    Without Hydra it starts the same command again, as Lightning does.

    Attributes:
        failed: Whether what was launched has failed in this process.
    """

    failed = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if not self.cluster_environment.creates_processes_externally:
            self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
            self._call_children_scripts()
            _Observer(self).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except Exception:
            self.failed = True
            raise

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        command, directory = rank_command() if self.num_processes > 1 else ([], None)
        _job_here().begin(self)
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            child = subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=directory)
            self.procs.append(child)

    def wait(self, seconds: float) -> None:
        """Waits until every child has ended; those that have not after ``seconds`` are killed."""
        end = time.monotonic() + seconds
        for child in self.procs:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                # A rank that hangs in a collective does not react to anything milder.
                child.kill()
                child.wait()


class _Observer(_ChildProcessObserver):
    """Ends this process when another rank dies under it.

    Args:
        launcher: The launcher that has just started them.
    """

    def __init__(self, launcher: Mesh3DLauncher) -> None:
        super().__init__(main_pid=os.getpid(), child_processes=launcher.procs)
        self._launcher = launcher

    @override
    def _run(self) -> bool:
        # What has failed here is being told, and a sweep goes on after a job that has ended.
        return not _job_here().is_running(self._launcher) or super()._run()


class _LaunchedJob:
    """The job whose ranks this process has launched: as one process has one environment, there is one of it."""

    def __init__(self) -> None:
        self._launcher: Mesh3DLauncher | None = None
        self._before: Mapping[str, str | None] = {}
        self._name: tuple[str, ...] | None = None

    def begin(self, launcher: Mesh3DLauncher) -> None:
        """Notes how everything is before the launch."""
        self._launcher, self._before, self._name = launcher, _environment(_LAUNCH_VARIABLES), hydra_job()

    def is_running(self, launcher: Mesh3DLauncher) -> bool:
        """Whether a launcher's job has neither failed nor ended."""
        return launcher is self._launcher and not launcher.failed and hydra_job() in (None, self._name)

    def end(self, *, failed: bool = False) -> None:
        """Waits for the ranks, and leaves the process as it was before the launch."""
        if self._launcher is None:
            return
        launcher, self._launcher = self._launcher, None
        launcher.wait(_SECONDS_TO_DIE if failed or launcher.failed else _SECONDS_TO_FINISH)
        if dist.is_initialized():
            dist.destroy_process_group()
        _restore(self._before)

    def end_unless_running(self) -> None:
        """Ends a job of a sweep if Hydra is at a later one."""
        if hydra_job() not in (None, self._name):
            self.end()


@functools.cache
def _job_here() -> _LaunchedJob:
    return _LaunchedJob()


def end_earlier_job() -> None:
    """Lets the ranks of an earlier job of a sweep go, so that the running one launches its own.

    Hydra tells nobody in a user's program that a job has ended.
    """
    _job_here().end_unless_running()


def check_started(environment: ClusterEnvironment, processes: int, nodes: int) -> None:
    """Refuses to wait for processes that a launcher outside has not started.

    Args:
        environment: What Lightning has found.
        processes: Devices of the Trainer on a node.
        nodes: Nodes of the Trainer.

    Raises:
        ConfigError: The launcher started other processes than the Trainer asks for.
    """
    if not environment.creates_processes_externally:
        return
    problem = ""
    try:
        environment.validate_settings(processes, nodes)
    except ValueError as error:
        problem = f": {error}"
    if not problem and environment.world_size() == processes * nodes:
        return
    slurm = isinstance(environment, SLURMEnvironment)
    name = "SLURM" if slurm else type(environment).__name__
    knobs = f"--nodes={nodes} --ntasks-per-node={processes}" if slurm else f"{processes} processes on each node"
    raise ConfigError(
        f"{name} started {environment.world_size()} processes, but the Trainer asks for devices={processes} x "
        f"num_nodes={nodes}{problem}",
        fix=f"{knobs} from the launcher, or the launcher's numbers for the Trainer",
    )


@contextmanager
def single_job() -> Iterator[None]:
    """Leaves the process as it was before a job, so that the next one can launch its own ranks.

    The ranks end with the job: given time after a success, killed soon after an error. Under an outside launcher one
    process group serves all jobs: its store cannot tell a second group from the first.
    """
    seeds = _environment(_SEED_VARIABLES)
    failed = True
    try:
        yield
        failed = False
    finally:
        _job_here().end(failed=failed)
        _restore(seeds)


def _environment(names: Iterable[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
