from pathlib import Path

import pytest

from lightning_3d.doctor import checks
from lightning_3d.doctor.facts import Gpu, Memory, Network, Place, Torch
from lightning_3d.doctor.findings import Finding, Level

_GIB = 2**30


def _levels(findings: list[Finding]) -> list[Level]:
    assert all(finding.fix for finding in findings if finding.level is not Level.OK)
    return [finding.level for finding in findings]


def test_broken_torch_is_a_problem_with_its_own_words() -> None:
    (finding,) = checks.check_torch(Torch(error="OSError: libcudart.so"))
    assert finding.level is Level.PROBLEM
    assert "libcudart.so" in finding.what


@pytest.mark.parametrize(
    ("torch", "last"),
    [
        (Torch(gloo=True), Level.OK),
        (Torch(nccl=True), Level.PROBLEM),
        (Torch(gloo=True, nccl=True, gpus=(Gpu(name="A", total=80, free=79),)), Level.OK),
        (Torch(gloo=True, gpus=(Gpu(name="A", total=80, free=79),)), Level.PROBLEM),
    ],
)
def test_backend_must_fit_the_devices(torch: Torch, last: Level) -> None:
    assert _levels(checks.check_torch(torch)) == [Level.OK, last]


@pytest.mark.parametrize(
    ("memory", "level", "words"),
    [
        (Memory(total=64 * _GIB, available=32 * _GIB, cgroup_limit=None, cgroup_used=0), Level.OK, "32.00 GiB free"),
        (Memory(total=64 * _GIB, available=_GIB, cgroup_limit=None, cgroup_used=0), Level.PROBLEM, "1.00 GiB free"),
        (
            Memory(total=64 * _GIB, available=32 * _GIB, cgroup_limit=4 * _GIB, cgroup_used=3 * _GIB),
            Level.PROBLEM,
            "1.00 GiB free of the container's 4.00 GiB",
        ),
    ],
)
def test_memory_counts_what_this_process_may_take(memory: Memory, level: Level, words: str) -> None:
    findings = checks.check_memory(memory)
    assert _levels(findings) == [level]
    assert words in findings[0].what


@pytest.mark.parametrize(("size", "level"), [(64 * 2**20, Level.NOTE), (0, Level.NOTE), (8 * _GIB, Level.OK)])
def test_shared_memory(size: int, level: Level) -> None:
    assert _levels(checks.check_shared_memory(size)) == [level]


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, Level.OK),
        ({"OMP_NUM_THREADS": "2"}, Level.OK),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, Level.OK),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}, Level.NOTE),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "x"}, Level.OK),
        ({"OMP_NUM_THREADS": "many"}, Level.PROBLEM),
        ({"OMP_NUM_THREADS": "0"}, Level.PROBLEM),
    ],
)
def test_threads(environment: dict[str, str], level: Level) -> None:
    assert _levels(checks.check_threads(environment, cores=2)) == [level]


@pytest.mark.parametrize(
    ("environment", "fixes"),
    [
        ({}, [""]),
        ({"NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, [""]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}, ["unset NCCL_P2P_DISABLE"]),
        (
            {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_IB_DISABLE": "1"},
            ["unset NCCL_IB_DISABLE", "unset CUDA_LAUNCH_BLOCKING"],
        ),
    ],
)
def test_variables_that_slow_down_are_noted(environment: dict[str, str], fixes: list[str]) -> None:
    findings = checks.check_slowing(environment)
    _levels(findings)
    assert [finding.fix for finding in findings] == fixes


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [(1024, -1, "ulimit -n 65536"), (1024, 2048, "ulimit -n 2048"), (20000, 20000, ""), (-1, -1, "")],
)
def test_open_files(soft: int, hard: int, fix: str) -> None:
    (finding,) = checks.check_open_files(soft, hard)
    assert finding.fix == fix


@pytest.mark.parametrize(
    ("writable", "free", "level"),
    [(True, 10 * _GIB, Level.OK), (True, 2**20, Level.PROBLEM), (False, 10 * _GIB, Level.PROBLEM)],
)
def test_places(writable: bool, free: int, level: Level) -> None:
    place = Place(purpose="cache", path=Path("/cache"), writable=writable, free=free)
    findings = checks.check_places([place, place])
    assert _levels(findings) == [level, level]
    assert "/cache" in findings[0].what


@pytest.mark.parametrize(
    ("network", "levels"),
    [
        (Network(loopback_error="", hostname="a", address="10.0.0.1"), [Level.OK, Level.OK]),
        (Network(loopback_error="not permitted", hostname="a", address=None), [Level.PROBLEM, Level.NOTE]),
    ],
)
def test_network(network: Network, levels: list[Level]) -> None:
    assert _levels(checks.check_network(network)) == levels
