"""What has no rule runs on the gathered whole: exact, slower, and told once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.log import get_logger
from lightning_3d.shards import nodes
from lightning_3d.shards.tensor import ShardTensor
from lightning_3d.shards.window import windows_of
from lightning_3d.units import format_bytes

_log = get_logger(__name__)
# Whoever reads these computes on memory that holds a part only.
_POINTERS = ("data_ptr", "storage", "untyped_storage", "__dlpack__", "__cuda_array_interface__", "set_")


def run_gathered(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str) -> Any:
    """Returns ``function(*args, **kwargs)`` with every shard gathered; what was written to is cut again.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: Its keyword arguments.
        reason: Why it cannot run on the shards.

    Raises:
        ModuleError: The function reads memory itself, or gives a shard another shape in place.
    """
    name = getattr(function, "__name__", str(function))
    shards = _shards((args, kwargs))
    if name in _POINTERS:
        raise ModuleError(
            f"{name} at {user_line()} reads the memory of a tensor that is cut over the tensor-parallel ranks.",
            fix="tensor_plan={'<module that computes it>': 'replicate'}, or torch.library.custom_op around the kernel",
        )
    _tell(name, reason, shards)
    wholes = {id(shard): _tracked(shard) for shard in shards}
    versions = {key: whole._version for key, whole in wholes.items()}
    whole_args, whole_kwargs = pytree.tree_map_only(ShardTensor, lambda shard: wholes[id(shard)], (args, dict(kwargs)))
    result = function(*whole_args, **whole_kwargs)
    for shard in shards:
        whole = wholes[id(shard)]
        if whole._version != versions[id(shard)]:
            _write_back(shard, whole, name)
            result = shard if result is whole else result
        result = windows_of(result, whole, functools.partial(_write_back, shard))
    return result


def gathered(shard: ShardTensor) -> Tensor:
    """Returns the whole tensor, replicated."""
    return nodes.gather(shard._local, shard._group, shard._dim, shard._segments)


def _shards(arguments: Any) -> list[ShardTensor]:
    """Returns every shard among the arguments once, in order."""
    found = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, ShardTensor)]
    return list({id(shard): shard for shard in found}.values())


def _tracked(shard: ShardTensor) -> Tensor:
    """Returns the whole tensor, with a version that counts what is written to it."""
    if not torch.is_inference_mode_enabled():
        return gathered(shard)
    with torch.inference_mode(False), torch.no_grad():
        return gathered(shard)


def _write_back(shard: ShardTensor, whole: Tensor, name: str) -> None:
    if whole.shape != shard.shape or whole.dtype != shard.dtype:
        raise ModuleError(
            f"{name} at {user_line()} changes shape or dtype, in place, of a tensor that is cut over the "
            "tensor-parallel ranks.",
            fix=f"the form that is not in place: {name.rstrip('_')}",
        )
    # Into the local tensor, so that what shares its memory sees the change.
    shard._local.copy_(nodes.part(whole, shard._group, shard._dim, shard._segments))


def _tell(name: str, reason: str, shards: Iterable[ShardTensor]) -> None:
    """Tells of this gather, once for its place."""
    place, size = user_line(), sum(shard.nbytes for shard in shards)
    if all(shard._group.first_gather(name, place) for shard in shards):
        _log.info("%s gathers %s at each call, at %s: %s", name, format_bytes(size), place, reason)
