"""The checks: each takes the facts it judges and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lightning_3d.doctor.facts import Facts, Memory, Network, Place, Torch
from lightning_3d.doctor.findings import Finding, note, ok, problem
from lightning_3d.doctor.launcher import check_launcher
from lightning_3d.doctor.versions import PACKAGES, PYTHON, check_versions
from lightning_3d.units import format_bytes

_GIB: Final = 2**30
_LEAST_MEMORY: Final = 2 * _GIB
_LEAST_SHARED_MEMORY: Final = _GIB
_LEAST_DISK: Final = _GIB
_LEAST_OPEN_FILES: Final = 4096
_UNSET: Final = ("", "0", "off", "info")
# NVIDIA's user guide of NCCL, "Environment Variables", of which it says that those for debugging should not stay; and
# torch's documentation of CUDA and torch.distributed.
_SLOWING: Final = MappingProxyType(
    {
        "NCCL_P2P_DISABLE": "GPUs of a node do not send to each other directly, over NVLink or PCI",
        "NCCL_SHM_DISABLE": "GPUs without direct links use the network in the place of shared memory",
        "NCCL_IB_DISABLE": "InfiniBand and RoCE are left out, nodes use IP sockets",
        "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
        "TORCH_DISTRIBUTED_DEBUG": "collectives are checked on all ranks",
    }
)


def check_all(facts: Facts) -> list[Finding]:
    """Returns what every check says, in the order of a run's needs."""
    return [
        *check_versions({PYTHON.name: facts.python}, [PYTHON]),
        *check_versions(facts.packages, PACKAGES),
        *check_launcher(facts.environment),
        *check_torch(facts.torch),
        *check_memory(facts.memory),
        *check_shared_memory(facts.shared_memory),
        *check_threads(facts.environment, facts.cores),
        *check_slowing(facts.environment),
        *check_open_files(*facts.open_files),
        *check_places(facts.places),
        *check_network(facts.network),
    ]


def check_torch(torch: Torch) -> list[Finding]:
    """Judges the devices and whether processes can talk on them."""
    if torch.error:
        return [problem(f"torch cannot be imported: {torch.error}", "pip install --force-reinstall torch")]
    findings = [
        ok(f"GPU {index}: {gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free")
        for index, gpu in enumerate(torch.gpus)
    ] or [ok("no GPU: runs use the CPU")]
    needed, present = ("nccl", torch.nccl) if torch.gpus else ("gloo", torch.gloo)
    if present:
        findings.append(ok(f"backend {needed} for {'GPU' if torch.gpus else 'CPU'} processes"))
    else:
        findings.append(problem(f"this torch has no {needed} backend", "install an official build of torch for Linux"))
    return findings


def check_memory(memory: Memory) -> list[Finding]:
    """Judges what this process may still take, in bytes."""
    free, of = memory.free, f"{format_bytes(memory.total)} of the host"
    if memory.cgroup_limit is not None:
        of = f"the container's {format_bytes(memory.cgroup_limit)}"
    what = f"memory: {format_bytes(free)} free of {of}"
    if free < _LEAST_MEMORY:
        return [problem(f"{what}; each process needs about 1 GiB", "free memory, or raise the container's limit")]
    return [ok(what)]


def check_shared_memory(size: int) -> list[Finding]:
    """Judges /dev/shm, through which DataLoader workers send batches; size in bytes."""
    what = f"shared memory: {format_bytes(size)} in /dev/shm"
    if size < _LEAST_SHARED_MEMORY:
        return [note(f"{what}; DataLoader workers may die of it", "docker run --shm-size=8g, or data.num_workers=0")]
    return [ok(what)]


def check_threads(environment: Mapping[str, str], cores: int) -> list[Finding]:
    """Judges OMP_NUM_THREADS against the cores that this process may use."""
    value = environment.get("OMP_NUM_THREADS")
    if value is None:
        return [ok(f"{cores} cores; OMP_NUM_THREADS is not set: the launcher shares them out")]
    if not value.isdigit() or value == "0":
        return [problem(f"OMP_NUM_THREADS={value!r} is not a positive number", "export OMP_NUM_THREADS=1")]
    local = environment.get("LOCAL_WORLD_SIZE", "")
    processes = max(1, int(local)) if local.isdigit() else 1
    what = f"{cores} cores; OMP_NUM_THREADS={value}, processes on this node: {processes}"
    if int(value) * processes > max(cores, processes):
        return [note(f"{what}: more threads than cores", f"export OMP_NUM_THREADS={max(1, cores // processes)}")]
    return [ok(what)]


def check_slowing(environment: Mapping[str, str]) -> list[Finding]:
    """Judges variables that are set to find a fault, and cost time for as long as they stay."""
    set_here = {name: why for name, why in _SLOWING.items() if environment.get(name, "0").lower() not in _UNSET}
    found = [note(f"{name}={environment[name]}: {why}", f"unset {name}") for name, why in set_here.items()]
    return found or [ok("no variable is set that slows NCCL or CUDA down")]


def check_open_files(soft: int, hard: int) -> list[Finding]:
    """Judges the limit of open files; -1 means none."""
    if 0 <= soft < _LEAST_OPEN_FILES:
        top = 65536 if hard < 0 else min(65536, hard)
        return [note(f"{soft} files may be open at once; many workers need more", f"ulimit -n {top}")]
    return [ok(f"open files: {'no limit' if soft < 0 else soft}")]


def check_places(places: Sequence[Place]) -> list[Finding]:
    """Judges the folders that a run writes to."""
    return [_check_place(place) for place in places]


def check_network(network: Network) -> list[Finding]:
    """Judges what the processes need to find each other."""
    findings = []
    if network.loopback_error:
        fix = "allow TCP on the loopback interface: ip link set lo up"
        findings.append(problem(f"no port of 127.0.0.1 can be bound: {network.loopback_error}", fix))
    else:
        findings.append(ok("a port of 127.0.0.1 can be bound"))
    if network.address is None:
        what = f"the host's name {network.hostname!r} has no address: fine on one node, not on several"
        findings.append(note(what, "add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=<interface>"))
    else:
        findings.append(ok(f"host {network.hostname} is {network.address}"))
    return findings


def _check_place(place: Place) -> Finding:
    what = f"{place.purpose}: {place.path}"
    if not place.writable:
        return problem(f"{what} is not writable", f"chmod u+w {place.path}, or start elsewhere")
    if place.free < _LEAST_DISK:
        return problem(f"{what} has {format_bytes(place.free)} free", "free some space, or start elsewhere")
    return ok(f"{what}, {format_bytes(place.free)} free")
