"""What a live storage is for: parameters, gradients, optimizer state, gathered copies, buffers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.counters.tensors import plain_tensors


class Category(str, enum.Enum):
    """Categories of live bytes; each storage is of one."""

    PARAMETER = "parameter"  # what the optimizer updates: a shard under FSDP2, else the whole
    GATHERED_PARAMETER = "gathered parameter"
    GRADIENT = "gradient"  # in the layout of the parameter
    GATHERED_GRADIENT = "gathered gradient"  # whole, before it is reduced and scattered
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    COMMUNICATION = "communication"
    OTHER = "activation, other"


def categorise(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Category]:
    """Returns the category of every storage that modules and optimizers own now, by the storage's key.

    Args:
        modules: Roots; plain, DistributedDataParallel, `fully_shard` or `replicate` modules.
        optimizers: Their optimizers.
    """
    found: dict[int, Category] = {}
    for category, value in _owned(tuple(modules), tuple(optimizers)):
        for tensor in plain_tensors(value):
            found.setdefault(storage_key(tensor), category)
    return found


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what identifies a tensor's storage while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _owned(
    modules: tuple[nn.Module, ...], optimizers: tuple[torch.optim.Optimizer, ...]
) -> Iterator[tuple[Category, object]]:
    """What is owned and as what, the surest first: while FSDP2 computes, a module's parameters are gathered ones."""
    for root in modules:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                yield from _fsdp_owned(module)
    for root in modules:
        for parameter in root.parameters():
            yield Category.PARAMETER, parameter
            yield Category.GRADIENT, parameter.grad
        for buffer in root.buffers():
            yield Category.BUFFER, buffer
    for optimizer in optimizers:
        yield Category.OPTIMIZER, [dict(state) for state in optimizer.state.values()]


def _fsdp_owned(module: FSDPModule) -> Iterator[tuple[Category, object]]:
    for group in module._get_fsdp_state()._fsdp_param_groups:
        # Hybrid sharding: reduced over the shards, waiting for the replicas until the last micro-batch.
        yield Category.GRADIENT, group._partial_reduce_output
        for parameter in group.fsdp_params:
            yield Category.PARAMETER, parameter._sharded_param_data
            yield Category.GRADIENT, parameter.sharded_param.grad
            yield Category.GATHERED_PARAMETER, parameter.all_gather_outputs
            yield Category.GATHERED_GRADIENT, parameter.unsharded_accumulated_grad
            whole = getattr(parameter, "_unsharded_param", None)  # absent until the first forward
            if whole is not None:
                yield Category.GATHERED_PARAMETER, whole
                yield Category.GATHERED_GRADIENT, whole.grad
