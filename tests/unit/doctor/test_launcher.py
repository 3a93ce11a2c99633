import pytest

from lightning_3d.doctor.findings import Level
from lightning_3d.doctor.launcher import check_launcher, detect_launcher

_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
_SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "5",
}


def _problems(environment: dict[str, str]) -> list[str]:
    return [finding.what for finding in check_launcher(environment) if finding.level is Level.PROBLEM]


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "none"),
        (_TORCHRUN, "torchrun"),
        (_SLURM, "SLURM"),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "interactive"}, "none"),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, "Lightning"),
    ],
)
def test_launcher_is_told_and_has_no_problem(environment: dict[str, str], launcher: str) -> None:
    assert detect_launcher(environment) == launcher
    assert _problems(environment) == []


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (_TORCHRUN | {"RANK": "4"}, "RANK=4 is outside WORLD_SIZE=4"),
        (_TORCHRUN | {"LOCAL_RANK": "7"}, "LOCAL_RANK=7 is outside LOCAL_WORLD_SIZE=4"),
        (_TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        ({k: v for k, v in _TORCHRUN.items() if k != "MASTER_ADDR"}, "torchrun did not set MASTER_ADDR"),
        (_SLURM | {"SLURM_NNODES": "3"}, "SLURM_NTASKS=8 is not SLURM_NNODES=3 x SLURM_NTASKS_PER_NODE=4"),
        (_SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is outside SLURM_NTASKS=8"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS=8, but no tasks per node"),
        ({"SLURM_NTASKS": "1"}, "a SLURM job, but the process was not started by srun"),
    ],
)
def test_what_does_not_fit_is_one_problem(environment: dict[str, str], text: str) -> None:
    assert _problems(environment) == [text]


def test_left_over_variables_are_noted() -> None:
    (finding,) = check_launcher({"WORLD_SIZE": "8", "MASTER_PORT": "1"})
    assert (finding.level, finding.fix) == (Level.NOTE, "unset WORLD_SIZE MASTER_PORT")
