"""Shards at the level of containers, and what crosses between stages: plain tensors, of shards the local parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.pipeline.record.hidden import Function
from lightning_3d.parallel.pipeline.record.step import Value
from lightning_3d.parallel.pipeline.run.placeholder import replaced
from lightning_3d.shards.executor import Shard, dispatch
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.rules import PROPERTIES
from lightning_3d.shards.tensor import ShardTensor


class WatchedShard(Shard):
    """A shard whose methods go through torch's function protocol, so that a mode sees them."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if getattr(func, "__name__", "") == "__get__" and name in PROPERTIES:
            return PROPERTIES[name](args[0])
        return dispatch(func, args, kwargs or {})


def _methods_of_tensors() -> Mapping[str, Any]:
    kept = {*vars(ShardTensor), *vars(WatchedShard)}
    return MappingProxyType(
        {name: getattr(Tensor, name) for name in vars(Shard) if hasattr(Tensor, name) and name not in kept}
    )


for _name, _method in _methods_of_tensors().items():
    setattr(WatchedShard, _name, _method)


def watched(tree: Any) -> Any:
    """Makes the shards in nested containers such as a mode sees, in place."""
    return replaced(tree, _TO_WATCHED)


def unwatched(tree: Any) -> Any:
    """Makes them fast again, in place."""
    return replaced(tree, _TO_FAST)


def local_part(tensor: Tensor, value: Value) -> Tensor:
    """Returns what a rank sends of a hidden value: a plain dense tensor.

    Raises:
        ModuleError: It is not what was recorded.
    """
    if isinstance(tensor, PartialTensor):
        tensor = tensor.share
    cut = tensor.cut if isinstance(tensor, ShardTensor) else None
    found = (tuple(tensor.shape), tensor.dtype, cut)
    if found != (value.shape, value.dtype, value.layout):
        raise ModuleError(
            f"{value.origin} is {_described(*found)}, and was {_described(value.shape, value.dtype, value.layout)} "
            "when the step was recorded with an input of this kind.",
            fix="shapes and dtypes of hidden states that depend on shapes of the batch, not on its values",
        )
    plain: Tensor = tensor._local if isinstance(tensor, ShardTensor) else tensor
    return plain.contiguous()


def with_part(local: Tensor, value: Value, group: ShardGroup | None) -> Tensor:
    """Returns the hidden value of which a rank has received its part.

    Args:
        local: The part.
        value: What it is a part of.
        group: The tensor axis; needed if values are cut over it.
    """
    if value.layout is None:
        return local
    assert group is not None, "values are cut over the tensor axis only"
    return WatchedShard(local, value.layout.dim, value.layout.segments, group)


def _as(kind: type[Shard], other: type[Shard]) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        if type(tensor) is kind:
            # Not another object: hidden values are told apart by identity.
            tensor.__class__ = other
        return tensor

    return change


_TO_WATCHED, _TO_FAST = _as(Shard, WatchedShard), _as(WatchedShard, Shard)


def _described(shape: tuple[int, ...], dtype: object, layout: object) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}" + (f" cut along {layout}" if layout else "")
