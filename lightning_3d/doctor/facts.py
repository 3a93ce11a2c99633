"""What the environment is: looked up here once, judged by ``checks``."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lightning_3d.doctor.versions import PACKAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One CUDA device: its name and its memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """What the installed torch can do; ``error`` is set if it cannot be imported."""

    error: str = ""
    gloo: bool = False
    nccl: bool = False
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Host memory in bytes; ``cgroup_limit`` is None where no limit is set."""

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int

    @property
    def free(self) -> int:
        """What this process may still take."""
        if self.cgroup_limit is None:
            return self.available
        return min(self.available, self.cgroup_limit - self.cgroup_used)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that a run writes to: what it is for, whether a file could be made there, free bytes."""

    purpose: str
    path: Path
    writable: bool
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """``loopback_error`` is empty if a port could be bound; ``address`` is None if the name does not resolve."""

    loopback_error: str
    hostname: str
    address: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the checks judge; sizes in bytes."""

    python: str
    packages: Mapping[str, str | None]
    environment: Mapping[str, str]
    torch: Torch
    cores: int
    memory: Memory
    shared_memory: int
    open_files: tuple[int, int]
    places: tuple[Place, ...]
    network: Network


def gather() -> Facts:
    """Looks at this process and its machine."""
    return Facts(
        python=platform.python_version(),
        packages=_versions(requirement.name for requirement in PACKAGES),
        environment=dict(os.environ),
        torch=_torch(),
        cores=len(os.sched_getaffinity(0)),
        memory=_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        places=_places(),
        network=_network(),
    )


def read_number(path: Path) -> int | None:
    """Returns the whole number in a file such as a cgroup's, or None if there is no file or no number."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_meminfo(text: str) -> dict[str, int]:
    """Returns the entries of ``/proc/meminfo`` in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def look_at_place(purpose: str, path: Path) -> Place:
    """Tries to make a file in the folder, or in the nearest folder above it that exists."""
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            writable = True
    except OSError:
        writable = False
    return Place(purpose=purpose, path=path, writable=writable, free=shutil.disk_usage(existing).free)


def _versions(names: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _torch() -> Torch:
    # A torch that is installed but broken fails in many ways; each is a finding here, not a traceback.
    try:
        import torch
        import torch.distributed as dist

        gpus = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append(Gpu(name=torch.cuda.get_device_name(index), total=total, free=free))
        if not dist.is_available():
            return Torch(gpus=tuple(gpus))
        return Torch(gloo=dist.is_gloo_available(), nccl=dist.is_nccl_available(), gpus=tuple(gpus))
    except (ImportError, OSError, RuntimeError) as error:
        return Torch(error=f"{type(error).__name__}: {error}")


def _memory() -> Memory:
    host = read_meminfo(Path("/proc/meminfo").read_text())
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    limit = read_number(v2 / "memory.max") or read_number(v1 / "memory.limit_in_bytes")
    used = read_number(v2 / "memory.current") or read_number(v1 / "memory.usage_in_bytes")
    return Memory(
        total=host["MemTotal"],
        available=host["MemAvailable"],
        # Version 1 says "no limit" by a number larger than any machine.
        cgroup_limit=limit if limit is not None and limit < host["MemTotal"] else None,
        cgroup_used=used or 0,
    )


def _places() -> tuple[Place, ...]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        look_at_place("working directory", Path.cwd()),
        look_at_place("runs and checkpoints", Path.cwd() / "logs"),
        look_at_place("cache", cache),
        look_at_place("temporary files", Path(tempfile.gettempdir())),
    )


def _network() -> Network:
    hostname = socket.gethostname()
    loopback_error = ""
    address = None
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
    except OSError as error:
        loopback_error = str(error)
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(hostname, None)[0][4][0])
    return Network(loopback_error=loopback_error, hostname=hostname, address=address)
