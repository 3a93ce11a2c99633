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


class Owners:
    """Modules and optimizers, asked again and again what they own; the modules inside of each other stay the same.

    Args:
        modules: Roots; plain, DistributedDataParallel, `fully_shard` or `replicate` modules.
        optimizers: Their optimizers.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        inside = tuple(dict.fromkeys(module for root in modules for module in root.modules()))
        self._units = tuple(module for module in inside if isinstance(module, FSDPModule))
        self._holders = tuple(module for module in inside if _is_holder(module))
        self._optimizers = tuple(optimizers)

    def __call__(self) -> dict[int, Category]:
        """Returns the category of every storage that is owned now, by the storage's key."""
        found: dict[int, Category] = {}
        for category, value in self._owned():
            for tensor in plain_tensors(value):
                found.setdefault(storage_key(tensor), category)
        return found

    def _owned(self) -> Iterator[tuple[Category, object]]:
        """What is owned, the surest first: while FSDP2 computes, a module's parameters are gathered ones."""
        for unit in self._units:
            yield from _fsdp_owned(unit)
        for module in self._holders:
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield Category.PARAMETER, parameter
                    yield Category.GRADIENT, parameter.grad
            yield Category.BUFFER, list(module._buffers.values())
        for optimizer in self._optimizers:
            yield Category.OPTIMIZER, [dict(state) for state in optimizer.state.values()]


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what identifies a tensor's storage while it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _is_holder(module: nn.Module) -> bool:
    """Whether it has parameters or buffers of its own that take memory: those of other ranks stay on meta."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and not tensor.is_meta for tensor in own)


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
