"""What has no rule runs on the gathered whole: exact, slower, and told once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError
from lightning_3d.log import get_logger
from lightning_3d.shards import nodes
from lightning_3d.shards.tensor import ShardTensor
from lightning_3d.units import format_bytes

_log = get_logger(__name__)
# Whoever reads these computes on memory that holds a part only.
_POINTERS = ("data_ptr", "storage", "untyped_storage", "__dlpack__", "__cuda_array_interface__", "set_")
_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def run_gathered(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str) -> Any:
    """Returns ``function(*args, **kwargs)`` with every shard gathered; in-place results are cut again.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: Its keyword arguments.
        reason: Why it cannot run on the shards.

    Raises:
        ModuleError: The function reads memory itself.
    """
    name = getattr(function, "__name__", str(function))
    shards = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardTensor)]
    if name in _POINTERS:
        raise ModuleError(
            f"{name} at {user_line()} reads the memory of a tensor that is cut over the tensor-parallel ranks.",
            fix="tensor_plan={'<module that computes it>': 'replicate'}, or torch.library.custom_op around the kernel",
        )
    _tell(name, reason, shards)
    whole_args, whole_kwargs = pytree.tree_map_only(ShardTensor, gathered, (args, dict(kwargs)))
    if not (_writes(name) and args and isinstance(args[0], ShardTensor)):
        return function(*whole_args, **whole_kwargs)
    target = args[0]
    written = whole_args[0].clone()
    result = function(written, *whole_args[1:], **whole_kwargs)
    # Into the local tensor, so that what shares its memory sees the change.
    target._local.copy_(nodes.part(written, target._group, target._dim, target._segments))
    return None if result is None else target


def gathered(shard: ShardTensor) -> Tensor:
    """Returns the whole tensor, replicated."""
    return nodes.gather(shard._local, shard._group, shard._dim, shard._segments)


def user_line() -> str:
    """Returns file and line of the code that called torch, outside of torch and of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, _TORCH, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _writes(name: str) -> bool:
    dunder = name.startswith("__")
    return name == "__setitem__" or (dunder and name[2] == "i" and name != "__invert__") or _in_place(name, dunder)


def _in_place(name: str, dunder: bool) -> bool:
    return name.endswith("_") and not dunder


def _tell(name: str, reason: str, shards: list[ShardTensor]) -> None:
    """Tells of this gather, once for its place."""
    place, size = user_line(), sum(shard.nbytes for shard in shards)
    if shards[0]._group.first_gather(name, place):
        _log.info("%s gathers %s at each call, at %s: %s", name, format_bytes(size), place, reason)
