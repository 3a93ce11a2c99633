"""The shard tensor of a trace: it knows which weights it comes from, and says so when it meets an obstacle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.tensor.trace.exchanges import Exchanges
from lightning_3d.shards.foreign import check_no_foreign_function
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.group import ShardGroup, ShardOptions
from lightning_3d.shards.layout import take
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules import PROPERTIES, RULES
from lightning_3d.shards.rules.table import called
from lightning_3d.shards.tensor import ShardTensor

Function = Callable[..., Any]


class Listener(Protocol):
    """Who hears what happens to shards."""

    def refused(self, function: str, shards: Sequence[TracedShard], refusal: Unshardable) -> None:
        """An operation has no exact form on these shards."""

    def computed(self, function: str, args: Any, shards: Sequence[TracedShard], result: Any) -> None:
        """An operation was computed by its rule; shards are all those among its arguments."""


class TraceGroup(ShardGroup):
    """Rank 0 of a group that does not exist: right shapes, and counts in place of communication.

    Args:
        size: Number of ranks.
        listener: Hears what happens to the shards of the group.
        options: How operations behave.

    Attributes:
        exchanges: What was asked for so far.
    """

    def __init__(self, size: int, listener: Listener, options: ShardOptions | None = None) -> None:
        super().__init__(size, 0, options)
        self.listener = listener
        self.exchanges = Exchanges()

    def close(self) -> None:
        """Lets go of the listener when the pass is over.

        Autograd's nodes keep the group, the listener may keep nodes, and the collector does not see through them.
        """
        del self.listener

    def sum(self, value: Tensor) -> Tensor:
        """Counts."""
        self.exchanges += Exchanges(sums=1)
        return value.clone()

    def max(self, value: Tensor) -> Tensor:
        """Counts as a sum: both are one all-reduce."""
        return self.sum(value)

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """Counts, and has the shape of the whole."""
        self.exchanges += Exchanges(gathers=1)
        shape = list(part.shape)
        shape[dim] = sum(segments)
        return part.new_empty(shape)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Counts, and has the shape of the part."""
        self.exchanges += Exchanges(scatters=1)
        return value.narrow(dim, 0, value.shape[dim] // self.size).clone()


class TracedShard(ShardTensor):
    """A shard on the virtual rank 0 of a trace.

    Attributes:
        origins: First names of the column weights whose outputs it was computed from.
        weight: Name of the weight that it is itself, or None for a value.
    """

    __slots__ = ("origins", "weight")

    origins: frozenset[str]
    weight: str | None
    _group: TraceGroup

    @classmethod
    def of(cls, value: Tensor, layout: tuple[int, tuple[int, ...]], group: TraceGroup, *, weight: str) -> TracedShard:
        """Returns rank 0's part of a weight."""
        dim, segments = layout
        shard = cls(take(value, dim, segments, group.rank, group.size), dim, segments, group)
        shard.origins, shard.weight = frozenset({weight}), weight
        return shard

    def like(self, local: Tensor, dim: int, segments: tuple[int, ...]) -> TracedShard:
        """Returns the result of an operation, marked when it is complete."""
        shard = super().like(local, dim, segments)
        shard.origins, shard.weight = self.origins, None
        return shard

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shards = [leaf for leaf in tensors if isinstance(leaf, TracedShard)]
        listener = shards[0]._group.listener
        try:
            result = _by_rule(func, args, kwargs, shards)
        except Unshardable as refusal:
            listener.refused(_name(func), shards, refusal)
            args, kwargs = pytree.tree_map_only(TracedShard, gathered, (args, kwargs))
            return func(*args, **kwargs)
        # A part of a weight is a weight.
        weight = shards[0].weight if all(_is_weight(tensor) for tensor in tensors) else None
        origins = frozenset[str]().union(*(shard.origins for shard in shards))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, TracedShard) and not any(leaf is shard for shard in shards):
                leaf.origins, leaf.weight = origins, weight
        listener.computed(_name(func), (args, kwargs), shards, result)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Where only compiled kernels arrive, and what a custom autograd function passes through."""
        shards = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, TracedShard)]
        shards[0]._group.listener.refused(_name(func), shards, Unshardable("compiled code takes the tensor's memory"))
        args, kwargs = pytree.tree_map_only(TracedShard, gathered, (args, kwargs or {}))
        return func(*args, **kwargs)


def _by_rule(function: Function, args: Any, kwargs: Mapping[str, Any], shards: Sequence[TracedShard]) -> Any:
    if not torch.is_grad_enabled():
        try:
            check_no_foreign_function(shards)
        except ModuleError as error:
            raise Unshardable(error.fact.partition(" (")[0]) from error
    rule = RULES.get(function)
    if rule is None and getattr(function, "__name__", "") == "__get__":
        rule = PROPERTIES.get(_name(function))
    if rule is None:
        raise Unshardable(f"{_name(function)} has no exact form on shards")
    if kwargs.get("out") is not None:
        raise Unshardable(f"{_name(function)} has a place for its result already")
    return called(rule, args, kwargs)


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, TracedShard) and tensor.weight is not None


def _name(function: Any) -> str:
    """The name of a function, or of the property that is read."""
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name
