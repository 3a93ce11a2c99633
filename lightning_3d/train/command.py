"""The verb ``train``: from the words of a command line to jobs on every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from lightning_3d.config.compose import QUIET_RANK, run_hydra, with_overrides
from lightning_3d.config.schema import RunConfig
from lightning_3d.config.search import importable_here
from lightning_3d.train.prepare import prepare


def run(arguments: Sequence[str]) -> int:
    """Trains as a command line asks.

    Args:
        arguments: Hydra's flags and overrides, without the verb.

    Returns:
        0, once every job has ended well.

    Raises:
        Lightning3DError: The configuration is impossible; no process was started.
    """
    # Lightning's own use of torch; nobody who trains can act on it, and every rank would print it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with importable_here():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Ranks that exist already must learn from rank 0 what to do; torch is needed to ask it.
            from lightning_3d.train.agree import run_together

            run_together(_job, arguments)
        else:
            run_hydra(_job(), _single_writer(arguments))
    return 0


def _job(announce: Callable[[RunConfig], None] = lambda run: None) -> Callable[[DictConfig], Any]:
    def job(cfg: DictConfig) -> float | None:
        announce(prepare(cfg))
        # A misspelt key should not wait for torch to be imported.
        from lightning_3d.train.job import train

        return train(cfg)

    return job


def _single_writer(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with which the tasks of a SLURM step use one directory, and only the first writes logs."""
    step = os.environ.get("SLURM_STEP_ID")
    if step is None or int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return list(arguments)
    own = [f"paths.run_name=slurm_{os.environ['SLURM_JOB_ID']}_{step}"]
    if os.environ["SLURM_PROCID"] != "0":
        own += QUIET_RANK
    return with_overrides(arguments, own)
