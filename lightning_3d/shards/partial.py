"""Replicated parameters whose gradients stay partial on every rank, to be summed over the ranks later, all at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree
from typing_extensions import Self

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.tensor import ShardTensor


class PartialTensor(torch.Tensor):
    """Stands for a replicated leaf in user code, until it is known what the leaf meets.

    Where it meets shards, the leaf itself is used: each rank's gradient is a summand. Where it meets replicated values
    only, every rank would compute the whole gradient, so each takes an equal share of it. Whatever a step does, the
    gradients of all ranks add up to the whole one.

    Args:
        leaf: The leaf, a plain tensor.
        group: The ranks whose gradients are summed.
    """

    __slots__ = ("_group", "_leaf")

    _leaf: Tensor
    _group: ShardGroup

    @staticmethod
    def __new__(cls: type[Self], leaf: Tensor, group: ShardGroup) -> Self:
        """Shows the leaf's shape, dtype and device."""
        partial: Self = torch.Tensor._make_wrapper_subclass(cls, leaf.shape, dtype=leaf.dtype, device=leaf.device)
        partial._leaf, partial._group = leaf, group
        return partial

    def __init__(self, *_: Any) -> None:
        """Everything is done where it is made."""

    @property
    def leaf(self) -> Tensor:
        """The leaf, for a use on parts."""
        return self._leaf

    @property
    def share(self) -> Tensor:
        """The leaf, for a use that is the same on all ranks."""
        leaf = self._leaf
        return divided(leaf, self._group) if leaf.requires_grad and torch.is_grad_enabled() else leaf

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As the leaf."""
        return self._leaf.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, ShardTensor):
                return kind.__torch_function__(func, types, args, kwargs)
        if func is nodes.copy:
            return args[0].leaf
        if func is nodes.part:
            value, group, dim, segments = args
            return take(value.leaf, dim, segments, group.rank, group.size).clone()
        args, kwargs = pytree.tree_map_only(PartialTensor, _share, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Where only compiled kernels arrive that took the tensor past torch's function protocol.

        Raises:
            ModuleError: Always: gradients would be lost without a sign.
        """
        raise ModuleError(
            f"{func} was called from compiled code with a parameter that is used on parts of the sequence or heads.",
            fix="torch.library.custom_op around the kernel, or sequence_parallel=False",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PartialTensor({tuple(self._leaf.shape)}, rank {self._group.rank})"


def divided(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns a replicated value whose gradient is divided by the ranks, each of which computes the whole of it."""
    if has_torch_function_unary(value):
        handled: Tensor = handle_torch_function(divided, (value,), value, group)
        return handled
    return _applied(_Divided, value, group.size)


def _applied(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _share(partial: PartialTensor) -> Tensor:
    return partial.share


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
