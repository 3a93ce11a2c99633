"""Real steps of the best meshes on this machine: the verb ``train`` in processes of its own, measured beside predicted.

What they have measured becomes one factor for all times, ``cluster.time_scale``; nothing else of a prediction changes.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.search import conf_dir
from lightning_3d.errors import MeshError, RunError
from lightning_3d.planner.paste import overrides
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.request import Request
from lightning_3d.units import counted, format_seconds

# Optimizer steps before those that are timed: the first one plans and builds.
_WARM_UP = 2
# What a trial leaves out of a training, and how it tells the speed of each step.
_QUIET = (
    "test=false",
    "explain=false",
    "logger=csv",
    "callbacks=default",
    "callbacks.model_checkpoint=null",
    "callbacks.throughput.every_n_steps=1",
    "callbacks.throughput.tokens_per_sample=null",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=-1",
    "trainer.limit_val_batches=0",
    "trainer.val_check_interval=1.0",
    "trainer.check_val_every_n_epoch=1",
    "trainer.enable_model_summary=false",
)
_SPEED = "samples_per_second"
_MOCK = "lightning_3d.reference.mock.MockDataModule"
# Lines of what a failed training said.
_LINES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Real steps of one mesh.

    Attributes:
        prediction: What was predicted.
        seconds: Of each step.
        failure: Why there are none.
    """

    prediction: Prediction
    seconds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def median(self) -> float:
        """Seconds of a step in the middle of them."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.median / self.prediction.step_seconds

    def ratio_at(self, scale: float) -> float:
        """Returns predicted over measured, were it predicted with another scale."""
        return scale / self.prediction.time_scale / self.ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Real steps of some meshes, and what follows from them.

    Attributes:
        trials: One for each mesh, as predicted from the fastest on.
        scale: What ``cluster.time_scale`` has to be.
        where: On what they ran.
    """

    trials: tuple[Trial, ...]
    scale: float
    where: str

    @property
    def steps(self) -> int:
        """Steps that were timed, all in all."""
        return sum(len(one.seconds) for one in self.trials)

    def __str__(self) -> str:
        lines = [f"Trial on {self.where}"]
        for one in self.trials:
            mesh = f"{one.prediction.mesh}, micro-batches of {one.prediction.batch.micro_size}"
            if one.failure:
                lines.append(f"  {mesh}: {one.failure}")
                continue
            spread = f"{format_seconds(min(one.seconds))} to {format_seconds(max(one.seconds))}"
            lines.append(
                f"  {mesh}: measured {format_seconds(one.median)} (median of {counted(len(one.seconds), 'step')}, "
                f"{spread}), predicted {format_seconds(one.prediction.step_seconds)}: x {one.ratio:.3g}; "
                f"calibrated {one.ratio_at(self.scale) - 1:+.0%}"
            )
        fastest = min((one for one in self.trials if one.seconds), key=lambda one: one.median)
        lines += [
            f"  fastest as measured: {fastest.prediction.mesh}",
            f"Calibrated by {counted(self.steps, 'step')}: all times x {self.scale:.3g}, which later plans take as "
            f"cluster.time_scale={self.scale:.3g}",
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain containers."""
        return {
            "where": self.where,
            "time_scale": self.scale,
            "steps": self.steps,
            "meshes": [
                {
                    "mesh": str(one.prediction.mesh),
                    "seconds": list(one.seconds),
                    "predicted": one.prediction.step_seconds,
                    "failure": one.failure or None,
                }
                for one in self.trials
            ],
        }


def run_trials(
    asked: Sequence[Prediction], request: Request, cfg: DictConfig, words: Sequence[str], directory: Path | None
) -> Trials:
    """Trains some steps on each mesh and returns how long they took.

    Args:
        asked: The meshes, with their predictions.
        request: What was asked.
        cfg: The composed configuration.
        words: The overrides that it was composed of.
        directory: A user's own directory of configuration.

    Raises:
        MeshError: This machine has fewer devices than a mesh.
        RunError: No training came to its end.
    """
    where = _machine(max((one.mesh.devices for one in asked), default=0), cfg, request)
    trials = tuple(_trial(one, request, cfg, words, directory) for one in asked)
    ratios = [one.ratio for one in trials if one.seconds]
    if not ratios:
        told = "\n".join(f"{one.prediction.mesh}: {one.failure}" for one in trials)
        raise RunError(
            f"no mesh was tried with success:\n{told}", fix="lightning-3d train with the same words tells more"
        )
    # The middle one of the ratios, by their product where there are two.
    scale = statistics.geometric_mean([statistics.median_low(ratios), statistics.median_high(ratios)])
    return Trials(trials=trials, scale=scale * request.cluster.time_scale, where=where)


def _machine(needed: int, cfg: DictConfig, request: Request) -> str:
    """What the trials run on, if it is enough."""
    gpus = torch.cuda.device_count() if cfg.trainer.accelerator != "cpu" else 0
    if cfg.trainer.accelerator == "cpu" or (cfg.trainer.accelerator == "auto" and not gpus):
        # Processes of a CPU share its cores; as many as a node of the cluster has are as many as the user wants.
        here, name = request.cluster.devices_per_node, "process"
        text = f"{counted(needed, 'process')} on {counted(_cores(), 'core')} of this machine"
    else:
        here, name = gpus, "GPU"
        text = f"{counted(needed, 'GPU')} of this machine"
    if needed <= here:
        return text
    raise MeshError(
        f"a trial runs on this machine: the meshes have {counted(needed, 'rank')}, and there "
        f"{'is' if here == 1 else 'are'} {counted(here, name)} for them.",
        valid=f"num_devices of 1 to {here}" if here else "trainer=cpu",
        fix=f"num_devices={here}" if here else "trainer=cpu cluster=cpu num_devices=2",
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _trial(one: Prediction, request: Request, cfg: DictConfig, words: Sequence[str], directory: Path | None) -> Trial:
    pasted = shlex.split(overrides(one, request))
    steps = _WARM_UP + int(cfg.trial_steps)
    own = [*_QUIET, f"trainer.max_steps={steps}"]
    if OmegaConf.select(cfg, "data._target_") == _MOCK:
        # Of its own accord it has one batch in an epoch.
        own.append(f"data.count={request.space.global_size * (steps + 1)}")
    with tempfile.TemporaryDirectory(prefix="lightning_3d_trial_") as folder:
        own.append(f"paths.log_dir={folder}")
        place = ["--config-dir", str(directory)] if directory else []
        command = [
            sys.executable,
            "-m",
            "lightning_3d",
            "train",
            *place,
            *_training_words(words, pasted),
            *pasted,
            *own,
        ]
        code, said = _run(command, float(cfg.trial_seconds), one.mesh.devices)
        speeds = _speeds(Path(folder))[_WARM_UP:-1]
    if code is None:
        return Trial(prediction=one, failure=f"still running after {cfg.trial_seconds} s, and was killed")
    if code or not speeds:
        return Trial(prediction=one, failure=f"failed with exit code {code}: {said}")
    return Trial(prediction=one, seconds=tuple(request.space.global_size / speed for speed in speeds))


def _training_words(words: Sequence[str], pasted: Sequence[str]) -> list[str]:
    """Returns the words of a plan that a training understands, less those that the mesh replaces."""
    plan = OmegaConf.load(conf_dir() / "plan.yaml")
    replaced = {word.partition("=")[0] for word in (*pasted, *_QUIET)}
    kept = []
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] not in plan and key not in replaced:
            kept.append(word)
    return kept


def _run(command: Sequence[str], seconds: float, processes: int) -> tuple[int | None, str]:
    """Runs a program and all that it starts, and kills all of it in the end.

    Returns:
        Its exit code, None if it took too long; and the end of what it said.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, _cores() // processes))}
    with tempfile.TemporaryFile("w+") as said:
        program = subprocess.Popen(
            command,
            env={**threads, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code: int | None = program.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Its ranks are of its group, and may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        said.seek(0)
        return code, "\n".join(said.read().strip().splitlines()[-_LINES:])


def _speeds(folder: Path) -> list[float]:
    """What the training's log says of each step, and of all of them in the end."""
    found = []
    for path in folder.rglob("metrics.csv"):
        with path.open(newline="") as file:
            found += [float(line[_SPEED]) for line in csv.DictReader(file) if line.get(_SPEED)]
    return found
