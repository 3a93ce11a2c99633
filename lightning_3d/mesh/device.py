"""From a MeshSpec to torch's DeviceMesh; the only place that makes one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import MeshError
from lightning_3d.mesh.spec import (
    AXES,
    DATA_AXIS,
    DATA_REPLICATE,
    DATA_SHARD,
    MODEL_GROUP,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    MeshSpec,
)


def build_device_mesh(spec: MeshSpec, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Returns the DeviceMesh of a spec on the default process group; a collective call.

    Its dimensions are ``data_parallel, pipeline_parallel, tensor_parallel`` whatever the rank order. With
    replicas the first becomes ``data_replicate, data_shard``, and ``mesh["data_parallel"]`` is their flattening.

    Args:
        spec: Degrees and rank order.
        device_type: ``"cpu"``, ``"cuda"``, ...
        timeout: How long a rank waits for the others, in the groups of all axes; torch's default if None, which is not
            that of the default group.

    Raises:
        MeshError: The process group has another size than the mesh.
    """
    world = dist.get_world_size()
    if world != spec.world:
        raise MeshError(f"the mesh is {spec}, but the process group has {world} ranks.", valid=spec.world)
    ranks = _rank_tensor(spec)
    names = tuple(axis.name for axis in AXES)
    if spec.data_replicate == 1:
        options = tuple(_options(size, device_type, timeout) for size in ranks.shape)
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=options)
    ranks = ranks.reshape(spec.data_replicate, spec.data_shard, *ranks.shape[1:])
    options = tuple(_options(size, device_type, timeout) for size in ranks.shape)
    names = (DATA_REPLICATE, DATA_SHARD, *names[1:])
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=options)
    mesh[DATA_REPLICATE, DATA_SHARD]._flatten(DATA_AXIS, backend_override=_options(spec.data, device_type, timeout))
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the sub-mesh over which parameters are sharded: replicas x shards if there are replicas, else 1-D."""
    return mesh[DATA_REPLICATE, DATA_SHARD] if _has_replicas(mesh) else mesh[DATA_AXIS]


def data_axis_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the 1-D mesh of the ranks that see different samples, flattened if there are replicas."""
    # Slicing the flattened name off the root would do too, but torch warns about it.
    return data_mesh(mesh)._flatten(DATA_AXIS) if _has_replicas(mesh) else mesh[DATA_AXIS]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the 1-D mesh of the ranks that compute each layer together."""
    return mesh[TENSOR_AXIS]


def pipeline_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the 1-D mesh of the ranks that compute one sample one after the other, stage by stage."""
    return mesh[PIPELINE_AXIS]


def model_mesh(mesh: DeviceMesh, timeout: timedelta | None = None) -> DeviceMesh:
    """Returns the 1-D mesh of the ranks that hold one copy of the model together, and so see the same samples.

    Args:
        mesh: From `build_device_mesh`.
        timeout: The same as there.
    """
    if mesh[PIPELINE_AXIS].size() == 1:
        return mesh[TENSOR_AXIS]
    if mesh[TENSOR_AXIS].size() == 1:
        return mesh[PIPELINE_AXIS]
    both = mesh[PIPELINE_AXIS, TENSOR_AXIS]
    return both._flatten(MODEL_GROUP, backend_override=_options(both.size(), mesh.device_type, timeout))


def _options(size: int, device_type: str, timeout: timedelta | None) -> Any:
    """What torch needs to give a group another time-out than its default; the default group itself serves all ranks."""
    if timeout is None or size == dist.get_world_size():
        return None, None
    if device_type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
    else:
        # Stubs know the base class alone.
        kind: Any = dist.ProcessGroupGloo.Options
        options = kind("gloo", timeout)
    return None, options


def _has_replicas(mesh: DeviceMesh) -> bool:
    return DATA_REPLICATE in (mesh.mesh_dim_names or ())


def _rank_tensor(spec: MeshSpec) -> torch.Tensor:
    """Ranks at ``[data, pipeline, tensor]``: filled in rank order, then turned to the order of the table."""
    # Always on the CPU: the mesh may be built under a default device, e.g. meta.
    filled = torch.arange(spec.world, dtype=torch.int, device="cpu").reshape([spec.size(k) for k in spec.rank_order])
    return filled.permute([spec.rank_order.index(axis.key) for axis in AXES]).contiguous()
