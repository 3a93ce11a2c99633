"""The shard tensor of training: every operation by its rule, and what has none on the gathered whole, exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.foreign import check_no_foreign_function
from lightning_3d.shards.gathered import run_gathered
from lightning_3d.shards.late import LateShard, can_be_late
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules import PROPERTIES, RULES
from lightning_3d.shards.rules.table import called
from lightning_3d.shards.tensor import ShardTensor


class Shard(ShardTensor):
    """A shard on which training runs.

    Methods of a tensor are rules of their own on this class, which spares torch's function protocol: an operation
    costs about 4 µs over the plain one.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs) if kwargs else dispatch(func, args, {})

    def float(self, *args: Any, **kwargs: Any) -> Shard:
        """In 32 bits."""
        if not args and not kwargs and can_be_late(self):
            return _LateShard.of(self)
        wide: Shard = dispatch(Tensor.float, (self, *args), kwargs)
        return wide

    def to(self, *args: Any, **kwargs: Any) -> Shard:
        """In another type or on another device."""
        if (args == (torch.float32,) and not kwargs) or (not args and kwargs == {"dtype": torch.float32}):
            return self if self.dtype == torch.float32 else self.float()
        changed: Shard = dispatch(Tensor.to, (self, *args), kwargs)
        return changed


def dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns what a function of torch makes of arguments that hold shards."""
    if not torch.is_grad_enabled():
        check_no_foreign_function(args)
    rule = RULES.get(function)
    if rule is None:
        return run_gathered(function, args, kwargs, "there is no rule for it")
    if kwargs.get("out") is not None:
        return run_gathered(function, args, kwargs, "the result has a place already")
    try:
        return called(rule, args, kwargs)
    except Unshardable as refusal:
        return run_gathered(function, args, kwargs, str(refusal))


def _as_method(function: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    grad_enabled = torch.is_grad_enabled

    def method(self: Shard, *args: Any, **kwargs: Any) -> Any:
        if not grad_enabled():
            check_no_foreign_function((self, *args))
        try:
            return called(rule, (self, *args), kwargs) if kwargs else rule(self, *args)
        except Unshardable as refusal:
            return run_gathered(function, (self, *args), kwargs, str(refusal))

    return method


def _equip(cls: type[Shard]) -> None:
    """Makes every rule of a tensor's method a method of the class, under all its names."""
    for name in dir(Tensor):
        function = getattr(Tensor, name)
        if callable(function) and function in RULES and name not in {**vars(ShardTensor), **vars(cls)}:
            setattr(cls, name, _as_method(function, RULES[function]))
    for name, read in PROPERTIES.items():
        setattr(cls, name, property(read))


_equip(Shard)


class _LateShard(LateShard, Shard):
    """A shard in 32 bits whose copy is made when it is needed."""

    __slots__ = ()
