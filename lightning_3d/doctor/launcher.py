"""Which launcher started this process, and whether what it set fits together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lightning_3d.doctor.findings import Finding, note, ok, problem

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM: Final = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_LIGHTNING: Final = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TEXT: Final = ("MASTER_ADDR",)
_INTERACTIVE_JOBS: Final = ("bash", "interactive")
_VARIABLES: Final = MappingProxyType({"torchrun": _TORCHRUN, "SLURM": _SLURM, "Lightning": _LIGHTNING})


def detect_launcher(environment: Mapping[str, str]) -> str:
    """Returns who starts the processes: ``torchrun``, ``SLURM``, ``Lightning`` (a child of it) or ``none``."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    # In an interactive allocation Lightning starts the processes itself.
    if "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in _INTERACTIVE_JOBS:
        return "SLURM"
    return "Lightning" if "LOCAL_RANK" in environment else "none"


def check_launcher(environment: Mapping[str, str]) -> list[Finding]:
    """Judges the launcher's variables.

    Args:
        environment: The process' environment variables.
    """
    launcher = detect_launcher(environment)
    if launcher == "none":
        return _check_none(environment)
    names = [name for name in _VARIABLES[launcher] if name in environment]
    findings = [ok(f"launcher {launcher}: {' '.join(f'{name}={environment[name]}' for name in names)}")]
    numbers = {}
    for name in names:
        if environment[name].isdigit():
            numbers[name] = int(environment[name])
        elif name not in _TEXT:
            findings.append(problem(f"{name}={environment[name]!r} is not a number", f"unset {name}"))
    if launcher == "torchrun":
        findings += _check_torchrun(environment, numbers)
    elif launcher == "SLURM":
        findings += _check_slurm(environment, numbers)
    return findings


def _check_none(environment: Mapping[str, str]) -> list[Finding]:
    # Lightning would ignore these, but a script that reads them would not.
    left = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in environment]
    if left:
        names = " ".join(left)
        return [note(f"no launcher, but {names} set: Lightning starts the processes itself", f"unset {names}")]
    return [ok("no launcher: Lightning starts the processes itself")]


def _check_torchrun(environment: Mapping[str, str], numbers: Mapping[str, int]) -> list[Finding]:
    missing = [name for name in _TORCHRUN if name not in environment]
    if missing:
        return [problem(f"torchrun did not set {' '.join(missing)}", "start with torchrun --nproc-per-node N -m ...")]
    return _check_inside(numbers, "RANK", "WORLD_SIZE") + _check_inside(numbers, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _check_slurm(environment: Mapping[str, str], numbers: Mapping[str, int]) -> list[Finding]:
    tasks = numbers.get("SLURM_NTASKS", 1)
    if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environment:
        return [problem(f"SLURM_NTASKS={tasks}, but no tasks per node", "use --ntasks-per-node, not --ntasks")]
    if "SLURM_PROCID" not in environment:
        return [problem("a SLURM job, but the process was not started by srun", "srun lightning-3d train ...")]
    findings = _check_inside(numbers, "SLURM_PROCID", "SLURM_NTASKS")
    nodes, per_node = environment.get("SLURM_NNODES", ""), numbers.get("SLURM_NTASKS_PER_NODE")
    if nodes.isdigit() and per_node is not None and int(nodes) * per_node != tasks:
        what = f"SLURM_NTASKS={tasks} is not SLURM_NNODES={nodes} x SLURM_NTASKS_PER_NODE={per_node}"
        findings.append(problem(what, f"--nodes={nodes} --ntasks-per-node={max(1, tasks // max(1, int(nodes)))}"))
    return findings


def _check_inside(numbers: Mapping[str, int], rank: str, size: str) -> list[Finding]:
    if rank not in numbers or size not in numbers or numbers[rank] < numbers[size]:
        return []
    fix = f"start every process by the same launcher; unset {rank} {size} in the shell"
    return [problem(f"{rank}={numbers[rank]} is outside {size}={numbers[size]}", fix)]
