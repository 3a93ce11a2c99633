"""Measuring the mesh of a configuration: how many processes of what, and what the numbers say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from lightning_3d.config.devices import asked_devices, smallest_world
from lightning_3d.config.schema import StrategyConfig, needed_mesh_options
from lightning_3d.doctor.findings import Finding, note, ok
from lightning_3d.doctor.processes import measure_here, measure_launched
from lightning_3d.doctor.rank import Task
from lightning_3d.doctor.speeds import Measured
from lightning_3d.errors import ConfigError
from lightning_3d.mesh.spec import TENSOR_AXIS, MeshSpec
from lightning_3d.mesh.topology import Topology
from lightning_3d.planner.cluster import Cluster, Level, cluster_text, measured_cluster
from lightning_3d.units import format_bytes

# A slower axis than this many times another one is worth a word.
_APART = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a measurement tells.

    Attributes:
        measured: The numbers.
        findings: What they mean.
        cluster: The same as a cluster of `lightning-3d plan`; None for one process.
    """

    measured: Measured
    findings: tuple[Finding, ...]
    cluster: Cluster | None


def measurement(cfg: DictConfig, memory: float) -> Answer | None:
    """Measures what a configuration asks for.

    Args:
        cfg: The composed configuration, of ``doctor.yaml``.
        memory: Bytes of the host's memory that are free.

    Returns:
        The numbers and what they say; None on ranks other than the first.

    Raises:
        ConfigError: An option is impossible.
        MeshError: The degrees do not fit the processes.
        RunError: A process failed, or it took too long.
    """
    config = needed_mesh_options(cfg.strategy, "to measure")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    gpus = torch.cuda.device_count() if str(cfg.trainer.accelerator) in ("auto", "gpu", "cuda") else 0
    if launched:
        world = int(os.environ["WORLD_SIZE"])
    else:
        # Where nothing says how many processes: one for each GPU, or what the degrees need at least.
        world = asked_devices(cfg.trainer.devices) or gpus or smallest_world(config)
    spec = MeshSpec.of(config, world)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if launched else world
    task = _task(cfg, config, spec, memory / local, "cuda" if gpus else "cpu")
    measured = measure_launched(task) if launched else measure_here(task)
    if measured is None:
        return None
    topology = Topology(spec=spec, devices_per_node=local)
    cores = len(os.sched_getaffinity(0))
    return Answer(
        measured=measured,
        findings=tuple(judged(measured, topology, cores=cores, threads=os.environ.get("OMP_NUM_THREADS"))),
        cluster=as_cluster(measured, topology) if measured.speeds else None,
    )


def judged(measured: Measured, topology: Topology, *, cores: int, threads: str | None) -> list[Finding]:
    """Returns what the numbers say.

    Args:
        measured: The numbers.
        topology: The mesh on its nodes.
        cores: Cores of this node that a process may use.
        threads: The value of OMP_NUM_THREADS.
    """
    findings = []
    local = topology.devices_per_node
    if measured.backend == "gloo":
        findings.append(ok("measured on CPU over gloo: nothing of it holds for GPUs"))
        if local > cores:
            what = f"{local} processes share {cores} cores: each does less than a core could"
            findings.append(note(what, f"trainer.devices={cores}"))
        elif threads is not None and threads.isdigit() and int(threads) * local > cores:
            what = f"{local} processes with OMP_NUM_THREADS={threads} share {cores} cores"
            findings.append(note(what, f"export OMP_NUM_THREADS={max(1, cores // local)}"))
    findings += _slow_tensor_axis(measured, topology)
    return findings


def _slow_tensor_axis(measured: Measured, topology: Topology) -> list[Finding]:
    """Tensor ranks exchange activations several times in each block: they need the fastest links."""
    if TENSOR_AXIS not in measured.axes:
        return []
    own = measured.bandwidth(TENSOR_AXIS)
    faster = {axis: measured.bandwidth(axis) for axis in measured.axes if measured.bandwidth(axis) > _APART * own}
    if not faster:
        return []
    best = max(faster, key=faster.__getitem__)
    what = (
        f"{TENSOR_AXIS} sends {format_bytes(own)}/s and {best} {format_bytes(faster[best])}/s, but the tensor axis "
        "sends most often"
    )
    order = topology.spec.rank_order
    if order[-1] != "tensor":
        inner = ",".join([*(axis for axis in order if axis != "tensor"), "tensor"])
        return [note(what, f"strategy.rank_order='\"{inner}\"'")]
    if topology.span(TENSOR_AXIS).nodes > 1:
        return [note(what, f"strategy.tensor_parallel_size={topology.devices_per_node} or less, inside a node")]
    return [note(what, "a smaller strategy.tensor_parallel_size, or devices with direct links for it")]


def as_cluster(measured: Measured, topology: Topology) -> Cluster:
    """Returns what was measured as a cluster that `lightning-3d plan` takes.

    Args:
        measured: The numbers, of two ranks at least.
        topology: The mesh on its nodes.
    """
    inside = [axis for axis in measured.axes if topology.span(axis).nodes == 1]
    outside = [axis for axis in measured.axes if axis not in inside]
    levels = []
    if inside:
        levels.append(_level("node", inside, measured, topology.devices_per_node))
    if outside:
        # With no group inside of a node, all that is known of its links is that they are not slower.
        levels += [] if inside else [_level("node", outside, measured, topology.devices_per_node)]
        levels.append(_level("network", outside, measured, None))
    return measured_cluster(
        name="measured",
        device=measured.device.name,
        memory=measured.device.memory,
        memory_bandwidth=measured.device.memory_bandwidth,
        matmul_flops=measured.device.matmul_flops,
        levels=levels,
        nodes=topology.nodes,
        source=f"lightning-3d doctor measure=true on {measured.mesh}, {measured.backend}",
    )


def _level(name: str, axes: Sequence[str], measured: Measured, devices: int | None) -> Level:
    """A level by the axis that sends fastest over it."""
    axis = max(axes, key=measured.bandwidth)
    return Level(name=name, bandwidth=measured.bandwidth(axis), latency=measured.latency(axis), devices=devices)


def write_cluster(cluster: Cluster, path: str | None) -> str:
    """Writes a cluster file, or returns its text with what to do with it.

    Args:
        cluster: The cluster.
        path: The file; None to print it.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = cluster_text(cluster)
    if path is None:
        return (
            f"\na cluster for lightning-3d plan: DIRECTORY/cluster/measured.yaml, and --config-dir DIRECTORY\n\n{text}"
        )
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"cluster_file={path} cannot be written: {error}") from error
    return f"\ncluster file {file}"


def _task(cfg: DictConfig, config: StrategyConfig, spec: MeshSpec, memory: float, device_type: str) -> Task:
    sizes, seconds = tuple(int(size) for size in cfg.sizes), float(cfg.seconds)
    if not sizes or min(sizes) < 1 or not seconds > 0:
        raise ConfigError(f"sizes={list(sizes)}, seconds={seconds:g} measure nothing.", valid="numbers above 0")
    backends: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}
    backend = config.process_group_backend or backends[device_type]
    assert dist.is_available()
    return Task(spec=spec, sizes=sizes, memory=memory, device_type=device_type, backend=backend, seconds=seconds)
