"""Starts the other local ranks of a job, so that each repeats exactly this job and nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from omegaconf import OmegaConf
from typing_extensions import override

from lightning_3d.config.compose import QUIET_RANK
from lightning_3d.config.search import conf_dir

# What a launch and a seed leave in the environment; the next job in this process must find none of it.
_JOB_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)
_SECONDS_TO_FINISH = 60.0
_SECONDS_TO_DIE = 2.0


class Mesh3DLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, made right for Hydra: sweeps, one output directory, any way to start the program.

    Without Hydra it starts the same command again, as Lightning does.
    """

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        command, directory = rank_command()
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


def rank_command() -> tuple[list[str], str | None]:
    """Returns the command that makes another rank of the running job, and the directory to start it in."""
    if not HydraConfig.initialized():
        return list(_basic_subprocess_cmd()), None
    directory = str(HydraConfig.get().runtime.cwd)
    return [*_program(directory), *rank_arguments()], directory


def rank_arguments() -> list[str]:
    """Returns Hydra's arguments that make another process repeat the running job, alone and in its directory."""
    job = HydraConfig.get()
    ours = [
        "hydra.mode=RUN",
        path_override("hydra.run.dir", job.runtime.output_dir),
        *QUIET_RANK,
    ]
    for key in ("num", "id"):
        if not OmegaConf.is_missing(job.job, key):
            ours.append(f"hydra.job.{key}={getattr(job.job, key)}")
    replaced = {override.partition("=")[0] for override in ours}
    kept = [text for text in job.overrides.hydra if text.lstrip("+").partition("=")[0] not in replaced]
    return [*_config_flags(job), *job.overrides.task, *kept, *ours]


def path_override(key: str, path: str) -> str:
    """Returns the override that sets a path, whatever signs of Hydra's grammar are in it."""
    return f"{key}={QuotedString(path, Quote.single).with_quotes()}"


@contextmanager
def single_job() -> Iterator[list[Mesh3DLauncher]]:
    """Leaves the process as it was before a job, so that the next one can launch its own ranks.

    Yields:
        A list for the launchers of the job. Their children end with the job: given time after a success, killed
        soon after an error.
    """
    before = {name: os.environ.get(name) for name in _JOB_VARIABLES}
    launchers: list[Mesh3DLauncher] = []
    seconds = _SECONDS_TO_DIE
    try:
        yield launchers
        seconds = _SECONDS_TO_FINISH
    finally:
        for launcher in launchers:
            launcher.wait(seconds)
        # Under an outside launcher one group serves all jobs: its store cannot tell a second group from the first.
        if before["LOCAL_RANK"] is None and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _program(directory: str) -> list[str]:
    import __main__  # the module itself changes with the way the program was started

    module = __main__.__spec__
    start = [os.path.join(directory, sys.argv[0])] if module is None else ["-m", module.name.removesuffix(".__main__")]
    return [sys.executable, *start, *_verbs(sys.argv[1:])]


def _verbs(words: list[str]) -> list[str]:
    """Returns the leading words that are the program's own: no flag and no override."""
    verbs: list[str] = []
    for word in words:
        if "=" in word or word.startswith(("-", "~")):
            break
        verbs.append(word)
    return verbs


def _config_flags(job: HydraConf) -> list[str]:
    flags = ["--config-name", str(job.job.config_name)]
    for source in job.runtime.config_sources:
        if source.provider == "main" and source.path not in ("", str(conf_dir())):
            flags += ["--config-path", f"pkg://{source.path}" if source.schema == "pkg" else source.path]
        if source.provider == "command-line":
            flags += ["--config-dir", _seen_from(job.runtime.cwd, source.path)]
    return flags


def _seen_from(directory: str, path: str) -> str:
    # A rank elsewhere has its own copy of what lies below the working directory.
    return os.path.relpath(path, directory) if Path(path).is_relative_to(directory) else path
