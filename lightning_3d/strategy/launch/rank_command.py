"""The command that makes another rank of the running job: the user's program, and this job's overrides alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from omegaconf import OmegaConf

from lightning_3d.config.compose import QUIET_RANK
from lightning_3d.config.search import conf_dir
from lightning_3d.errors import ConfigError

# The one launcher of Hydra's that runs jobs in the process whose command line is the user's.
_LAUNCHER_IN_THIS_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def hydra_job() -> tuple[str, ...] | None:
    """Returns what tells a job of Hydra from the next one of a sweep; None without Hydra."""
    if not HydraConfig.initialized():
        return None
    job = HydraConfig.get()
    # Between the jobs of a sweep neither is set.
    parts = ((job.runtime, "output_dir"), (job.job, "num"))
    return tuple("" if OmegaConf.is_missing(part, name) else str(getattr(part, name)) for part, name in parts)


def rank_command() -> tuple[list[str], str | None]:
    """Returns the command that makes another rank of the running job, and the directory to start it in.

    Raises:
        ConfigError: Hydra runs the job inside of a program that is not the user's.
    """
    if not HydraConfig.initialized():
        return list(_basic_subprocess_cmd()), None
    job = HydraConfig.get()
    launcher = str(job.launcher.get("_target_"))
    if job.mode == RunMode.MULTIRUN and launcher != _LAUNCHER_IN_THIS_PROCESS:
        raise ConfigError(
            f"{launcher} runs the job inside a program of its own, which cannot be started again as another rank",
            fix="hydra/launcher=basic, or let that launcher start every process of the job, as submitit_slurm does "
            "with tasks_per_node equal to the Trainer's devices",
        )
    directory = str(job.runtime.cwd)
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
