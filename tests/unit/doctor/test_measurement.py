from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_3d import doctor
from lightning_3d.config.compose import compose_run
from lightning_3d.doctor import measurement as doctor_measurement
from lightning_3d.doctor import processes, rank
from lightning_3d.doctor.findings import Level
from lightning_3d.doctor.measurement import as_cluster, judged, measurement
from lightning_3d.doctor.rank import Task
from lightning_3d.doctor.speeds import Device, Measured, Speed
from lightning_3d.errors import ConfigError, MeshError, RunError
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.mesh.topology import Topology
from lightning_3d.planner.cluster import Cluster, load_cluster

_DATA, _TENSOR = "data_parallel", "tensor_parallel"
_DEVICE = Device(name="a device", memory=8e9, memory_bandwidth=1e10, matmul_flops={"bf16": 2e12, "fp32": 1e12})


def _measured(seconds: dict[str, float], backend: str = "nccl") -> Measured:
    """An all-reduce of 1 MB on two ranks, by axis, and an all-gather of few bytes a thousandth of it."""
    speeds = [
        speed
        for axis, value in seconds.items()
        for speed in (
            Speed(operation="all_reduce", axis=axis, ranks=2, payload=10**6, seconds=value),
            Speed(operation="all_gather", axis=axis, ranks=2, payload=1000, seconds=value / 1000),
        )
    ]
    return Measured(mesh="a mesh", backend=backend, device=_DEVICE, speeds=tuple(speeds))


def _topology(per_node: int, **spec: Any) -> Topology:
    return Topology(spec=MeshSpec(data=2, pipeline=1, tensor=2, **spec), devices_per_node=per_node)


def test_bandwidth_is_what_a_rank_sends_in_a_ring() -> None:
    measured = _measured({_DATA: 0.01, _TENSOR: 0.002})
    assert measured.bandwidth(_DATA) == pytest.approx(1e8)
    assert measured.bandwidth(_TENSOR) == pytest.approx(5e8)
    assert measured.latency(_DATA) == pytest.approx(1e-5)
    rows = [line.split() for line in str(measured).splitlines()]
    assert ["tensor_parallel", "all_reduce", "2"] in [row[:3] for row in rows]


@pytest.mark.parametrize(
    ("tensor", "topology", "fix"),
    [
        (0.01, _topology(4), None),
        (0.014, _topology(4), None),
        (0.02, _topology(4), "a smaller strategy.tensor_parallel_size"),
        (0.02, _topology(1), "strategy.tensor_parallel_size=1 or less, inside a node"),
        (
            0.02,
            _topology(2, rank_order=("tensor", "pipeline", "data")),
            "strategy.rank_order='\"pipeline,data,tensor\"'",
        ),
    ],
)
def test_a_slow_tensor_axis_is_told_with_a_way_out(tensor: float, topology: Topology, fix: str | None) -> None:
    findings = judged(_measured({_DATA: 0.01, _TENSOR: tensor}), topology, cores=8, threads=None)
    assert [finding.level for finding in findings] == [Level.NOTE] * (fix is not None)
    assert all(finding.fix.startswith(str(fix)) for finding in findings)


@pytest.mark.parametrize(
    ("cores", "threads", "fix"),
    [(2, "1", "trainer.devices=2"), (4, "2", "export OMP_NUM_THREADS=1"), (4, "1", None), (8, "2", None)],
)
def test_processes_that_share_cores_are_told(cores: int, threads: str, fix: str | None) -> None:
    findings = judged(_measured({_DATA: 0.01}, "gloo"), _topology(4), cores=cores, threads=threads)
    assert findings[0].level is Level.OK
    assert [finding.fix for finding in findings[1:]] == [fix] * (fix is not None)


def test_the_cluster_has_a_level_for_what_was_measured() -> None:
    inside = as_cluster(_measured({_DATA: 0.01, _TENSOR: 0.002}), _topology(4))
    assert [(level.name, level.devices) for level in inside.levels] == [("node", 4)]
    two = as_cluster(_measured({_DATA: 0.01, _TENSOR: 0.002}), _topology(2))
    assert [(level.name, level.devices) for level in two.levels] == [("node", 2), ("network", None)]
    assert two.levels[0].bandwidth > two.levels[1].bandwidth
    assert (two.nodes, two.devices) == (2, 4)
    assert two.peak_flops == {"bf16": 2e12, "fp32": 1e12}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a launcher are none of ours."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.timeout(300)
def test_a_mesh_of_two_axes_is_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster" / "measured.yaml"
    words = ["measure=true", "trainer.devices=4", "strategy.tensor_parallel_size=2", "sizes=[256,65536]", "seconds=240"]
    assert doctor.run([*words, f"cluster_file={file}"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith((_DATA, _TENSOR))]
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send")
    assert [row[:3] for row in rows] == [[axis, each, "2"] for axis in (_DATA, _TENSOR) for each in operations]
    assert "ok       measured on CPU over gloo: nothing of it holds for GPUs" in out
    assert f"cluster file {file}" in out
    values = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict)
    found = Cluster.from_mapping({str(key): value for key, value in values.items()})
    assert found.devices == 4
    # Orders of magnitude of any machine.
    assert 1e8 < found.peak_flops["fp32"] < 1e14
    assert 1e-6 < found.levels[0].latency < 1
    assert set(found.peak_flops) <= set(load_cluster("cpu").peak_flops)


def _hang(*_: Any) -> None:
    time.sleep(600)


@pytest.mark.usefixtures("short")
@pytest.mark.timeout(60)
def test_a_measurement_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_serve", _hang)
    task = Task(
        spec=MeshSpec(data=2, pipeline=1, tensor=1),
        sizes=(1,),
        memory=1.0,
        device_type="cpu",
        backend="gloo",
        seconds=1,
    )
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"was not over after 1 s; rank 0, 1 was still running"):
        processes.measure_here(task)
    assert time.monotonic() - begin < 20


def test_a_process_without_a_parent_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(rank.os, "_exit", codes.append)
    rank._give_up(1, 2.0)
    assert codes == [124]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["measur=true"], ConfigError, "there is no key measur"),
        (["measure=true", "strategy=single"], ConfigError, "has no mesh to measure"),
        (["measure=true", "trainer.devices=3", "strategy.tensor_parallel_size=2"], MeshError, "3 processes"),
        (["measure=true", "trainer.devices=many"], ConfigError, "trainer.devices=many names no device"),
        (["measure=true", "sizes=[0]"], ConfigError, "measure nothing"),
    ],
)
def test_what_cannot_be_measured_is_one_error(words: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        doctor.run(words)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("accelerator", "ranks", "device"), [("cpu", 2, "cpu"), ("auto", 4, "cuda")])
def test_what_the_accelerator_says_decides_how_many_processes(
    accelerator: str, ranks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of the machine, where they are measured; else what the degrees need."""

    def asked(task: Task) -> Measured:
        assert (task.spec.world, task.device_type) == (ranks, device)
        raise RunError("enough")

    words = [f"trainer.accelerator={accelerator}", "strategy.tensor_parallel_size=2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(doctor_measurement, "measure_here", asked)
    with pytest.raises(RunError, match="enough"):
        measurement(compose_run(words, config_name="doctor"), 1e9)


def test_the_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["--cfg", "job"]) == 0
    assert "measure: false" in capsys.readouterr().out
    assert callable(measurement)
