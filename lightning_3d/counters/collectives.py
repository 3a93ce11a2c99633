"""Counts collectives by operation and mesh axis: calls, payload, bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupMember
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.counters.tensors import total_bytes
from lightning_3d.wire import HEAD, row_text, wire_factor

# The autograd namespace is left out: each of its operations calls one of these.
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")

# Start of an operation's name without underscores -> what it is. The first match counts.
_OPERATIONS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("sharddimalltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("isend", "send"),
    ("recv", "receive"),
    ("irecv", "receive"),
    ("batchp2pops", "send_receive"),
)
# These move no payload.
_SILENT = ("waittensor", "wraptensorautograd", "barrier", "monitoredbarrier", "checkfornan", "meshgetprocessgroup")
_GROUP_ARGUMENTS = ("process_group", "group_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRow:
    """All calls of one operation over one axis.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ...
        axis: Name of the mesh axis, ``world``, or the ranks of a group that has no name.
        group_size: Ranks in the group.
        calls: Number of calls.
        payload: Bytes of the whole tensors: gathered, or before they are scattered.
        wire: Bytes that one rank sends, in a ring: payload x (n - 1) / n, twice that for an all-reduce, the payload
            itself for rooted operations and between two ranks; nothing in a group of one.
    """

    operation: str
    axis: str
    group_size: int
    calls: int
    payload: int
    wire: float

    def __str__(self) -> str:
        return row_text(self.operation, self.axis, self.group_size, self.calls, self.payload, self.wire)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTable:
    """What was counted, one row per operation and axis, in order of first use.

    Args:
        rows: The rows.
    """

    rows: tuple[CollectiveRow, ...]

    def calls(self, operation: str | None = None, axis: str | None = None) -> int:
        """Returns the calls of an operation over an axis; None stands for all."""
        return sum(row.calls for row in self._select(operation, axis))

    def payload(self, operation: str | None = None, axis: str | None = None) -> int:
        """Returns the payload in bytes of an operation over an axis; None stands for all."""
        return sum(row.payload for row in self._select(operation, axis))

    def wire(self, operation: str | None = None, axis: str | None = None) -> float:
        """Returns the bytes that one rank sends for an operation over an axis; None stands for all."""
        return sum(row.wire for row in self._select(operation, axis))

    def __str__(self) -> str:
        return "\n".join([HEAD, *map(str, self.rows)])

    def _select(self, operation: str | None, axis: str | None) -> list[CollectiveRow]:
        return [row for row in self.rows if operation in (None, row.operation) and axis in (None, row.axis)]


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the code inside ``with``, on real and on fake tensors, waited for or not.

    It sees what DistributedDataParallel's reducer and FSDP2 issue, and what DTensors cause.

    Args:
        groups: A DeviceMesh, whose dimensions (flattened ones too) name the axes, or names and process groups.
    """

    def __init__(self, groups: DeviceMesh | Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = _mesh_groups(groups) if isinstance(groups, DeviceMesh) else groups
        self._axes: dict[str, str] = {}
        for axis, group in named.items():
            self._axes.setdefault(group.group_name, axis)
        self._rows: dict[tuple[str, str], CollectiveRow] = {}

    @property
    def table(self) -> CollectiveTable:
        """What was counted since the start or the last `reset`."""
        return CollectiveTable(rows=tuple(self._rows.values()))

    def reset(self) -> None:
        """Forgets what was counted."""
        self._rows.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come back here on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = operation_of(func)
        if operation is not None:
            arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            self._count(operation, arguments, result)
        return result

    def _count(self, operation: str, arguments: dict[str, Any], result: object) -> None:
        group = _group_of(arguments)
        size = group.size()
        axis = self._axes.get(group.group_name) or _ranks_text(group)
        payload = max(total_bytes(value) for value in (*arguments.values(), result))
        old = self._rows.get((operation, axis))
        self._rows[operation, axis] = CollectiveRow(
            operation=operation,
            axis=axis,
            group_size=size,
            calls=(old.calls if old else 0) + 1,
            payload=(old.payload if old else 0) + payload,
            wire=(old.wire if old else 0.0) + payload * wire_factor(operation, size),
        )


def operation_of(func: Any) -> str | None:
    """Returns what a dispatched operation is among the collectives, or None; unknown ones keep their own name."""
    if func.namespace not in _NAMESPACES:
        return None
    name: str = func._schema.name.split("::")[1]
    bare = name.replace("_", "")
    if bare in _SILENT:
        return None
    return next((operation for start, operation in _OPERATIONS if bare.startswith(start)), name)


def _group_of(arguments: dict[str, Any]) -> dist.ProcessGroup:
    (handle,) = (arguments[name] for name in _GROUP_ARGUMENTS if name in arguments)
    if isinstance(handle, torch.ScriptObject):
        handle = dist.ProcessGroup.unbox(handle)
    if isinstance(handle, str):
        handle = _resolve_process_group(cast(Any, handle))
    assert isinstance(handle, dist.ProcessGroup)
    return handle


def _ranks_text(group: dist.ProcessGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    return "world" if group is GroupMember.WORLD else f"ranks {','.join(map(str, ranks))}"


def _mesh_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    names = (*(mesh.mesh_dim_names or ()), *mesh._get_root_mesh()._flatten_mapping)
    return {name: mesh.get_group(name) for name in names}
