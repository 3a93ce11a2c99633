"""What one rank does while a mesh is measured: collectives on each axis, products, copies."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.doctor.speeds import Device, Measured, Speed
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import AXES, MeshSpec

# Who has started this process ends it sooner, unless it is gone itself.
_GRACE_SECONDS = 5.0
_TOO_LONG = 124
# Each measurement repeats until it took this long, between these bounds.
_SECONDS, _LEAST, _MOST = 0.25, 5, 200
_WIDTHS: Mapping[str, int] = {"cpu": 1024, "cuda": 8192}
_COPIED: Mapping[str, int] = {"cpu": 64 * 2**20, "cuda": 2**30}
_ELEMENT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is to be measured.

    Attributes:
        spec: Degrees and rank order of the mesh.
        sizes: Bytes of the tensors that are sent.
        memory: Bytes of the host's memory that a process may take.
        device_type: ``"cpu"`` or ``"cuda"``.
        backend: Of the process group.
        seconds: Time that the measurement may take; a process that still runs a little later ends itself.
    """

    spec: MeshSpec
    sizes: tuple[int, ...]
    memory: float
    device_type: str
    backend: str
    seconds: float


def measure(task: Task, rank: int, local_rank: int, init: str) -> Measured | None:
    """Measures with all other ranks, and returns what was found on rank 0, None on the others.

    Args:
        task: The same on all ranks.
        rank: This rank.
        local_rank: Its place on its node, which is the number of its GPU.
        init: Where ranks meet, for ``torch.distributed.init_process_group``.
    """
    limit = threading.Timer(task.seconds + _GRACE_SECONDS, _give_up, args=(rank, task.seconds))
    limit.daemon = True
    limit.start()
    device = torch.device(task.device_type, local_rank) if task.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=task.seconds)
    dist.init_process_group(task.backend, init_method=init, rank=rank, world_size=task.spec.world, timeout=timeout)
    try:
        found = _measured(task, device)
    finally:
        dist.destroy_process_group()
        limit.cancel()
    return found if rank == 0 else None


def _give_up(rank: int, seconds: float) -> None:
    print(f"rank {rank}: the measurement was not over after {seconds:.0f} s", file=sys.stderr, flush=True)
    os._exit(_TOO_LONG)


def _measured(task: Task, device: torch.device) -> Measured:
    mesh = build_device_mesh(task.spec, device.type, timedelta(seconds=task.seconds))
    speeds: list[Speed] = []
    for axis in AXES:
        size = task.spec.size(axis.name)
        if size > 1:
            speeds += _axis_speeds(axis.name, mesh.get_group(axis.name), task.sizes, device)
    own = _device(task, device)
    devices: list[Device] = [own] * task.spec.world
    dist.all_gather_object(devices, own)
    return Measured(
        mesh=str(task.spec),
        backend=task.backend,
        device=_slowest(devices),
        speeds=tuple(speeds),
    )


def _slowest(devices: list[Device]) -> Device:
    first = devices[0]
    return Device(
        name=first.name,
        memory=min(each.memory for each in devices),
        memory_bandwidth=min(each.memory_bandwidth for each in devices),
        matmul_flops={name: min(each.matmul_flops[name] for each in devices) for name in first.matmul_flops},
    )


def _axis_speeds(axis: str, group: dist.ProcessGroup, sizes: tuple[int, ...], device: torch.device) -> list[Speed]:
    count, found = group.size(), []
    for size in sizes:
        whole = torch.zeros(max(1, size // _ELEMENT // count) * count, device=device)
        part = torch.zeros(len(whole) // count, device=device)
        for operation, call in _operations(group, whole, part).items():
            seconds = _time(call, device)
            found.append(Speed(operation=operation, axis=axis, ranks=count, payload=whole.nbytes, seconds=seconds))
    return found


def _operations(group: dist.ProcessGroup, whole: Tensor, part: Tensor) -> dict[str, Callable[[], object]]:
    rank, size, other = group.rank(), group.size(), torch.empty_like(whole)
    # Under their names since torch 2.13, or those before.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def pass_on() -> None:
        """Every rank sends to the next one, as the stages of a pipeline do at the same time."""
        work = [
            dist.isend(whole, group=group, group_dst=(rank + 1) % size),
            dist.irecv(other, group=group, group_src=(rank - 1) % size),
        ]
        for each in work:
            assert each is not None
            each.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "send": pass_on,
    }


def _device(task: Task, device: torch.device) -> Device:
    width, copied = _WIDTHS[device.type], _COPIED[device.type]
    flops = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
        flops[name] = 2 * width**3 / _time(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]
    source = torch.ones(copied // _ELEMENT, device=device)
    target = torch.empty_like(source)
    cuda = device.type == "cuda"
    return Device(
        name=torch.cuda.get_device_name(device) if cuda else "CPU process",
        memory=float(torch.cuda.get_device_properties(device).total_memory) if cuda else task.memory,
        memory_bandwidth=2 * source.nbytes / _time(lambda: target.copy_(source), device),
        matmul_flops=flops,
    )


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the median of some, of the slowest rank; all ranks begin each of them together."""

    def once() -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    first = min(once() for _ in range(2))
    wish = torch.tensor([max(_LEAST, min(_MOST, int(_SECONDS / max(first, 1e-6))))], device=device)
    dist.all_reduce(wish, op=dist.ReduceOp.MIN)
    median = torch.tensor([statistics.median(once() for _ in range(int(wish)))], dtype=torch.float64, device=device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)
