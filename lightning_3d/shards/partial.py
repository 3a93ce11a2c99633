"""Replicated values whose gradients are partial: those of all ranks add up to the whole gradient.

A parameter that meets shards gets such a gradient on every rank. To sum it at once costs an all-reduce for each use;
summed later, the gradients of all such parameters are one all-reduce for each optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.foreign import check_not_handed_over
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.protocol import applied, one_call, writes_to_first
from lightning_3d.shards.tensor import ShardTensor


class PartialTensor(torch.Tensor):
    """Stands for a replicated value in user code: a parameter, or what was computed from one.

    Where it meets shards, its value is used as it is: each rank's gradient is a summand. Where it meets replicated
    values, these are copied for use on parts, and the result is partial again. Where it has to be plain, each rank
    takes an equal share of the gradient, which all of them have. So whatever a step does, the gradients of all ranks
    add up to the whole one, and where values are met by shards in the end, nothing was summed on the way.

    Args:
        value: A plain tensor: a leaf, or one that wants a gradient.
        group: The ranks whose gradients are summed.
    """

    __slots__ = ("_group", "_value")

    _value: Tensor
    _group: ShardGroup

    @staticmethod
    def __new__(cls: type[Self], value: Tensor, group: ShardGroup) -> Self:
        """Shows the value's shape, dtype and device."""
        partial: Self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        partial._value, partial._group = value, group
        return partial

    def __init__(self, *_: Any) -> None:
        """Everything is done where it is made."""

    @property
    def value(self) -> Tensor:
        """The value, for a use on parts."""
        return self._value

    @property
    def share(self) -> Tensor:
        """The value, for a use that is the same on all ranks."""
        value = self._value
        return divided(value, self._group) if value.requires_grad and torch.is_grad_enabled() else value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As the value."""
        return self._value.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, ShardTensor):
                return kind.__torch_function__(func, types, args, kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            return rule(*args, **kwargs)
        partials: list[PartialTensor] = []
        _collect((args, kwargs), partials)
        if not torch.is_grad_enabled():
            check_not_handed_over(partials, "a tensor whose gradient is summed later", _PLAIN_KERNEL)
        if kwargs.get("out") is not None or (writes_to_first(func) and not isinstance(args[0], PartialTensor)):
            # What is written to stays plain.
            args, kwargs = _replaced((args, kwargs), _shared)
            return func(*args, **kwargs)
        group = partials[0]._group
        args, kwargs = _replaced(
            (args, kwargs), lambda value: value._value if _is_partial(value) else nodes.shared_copy(value, group)
        )
        return _wrapped(func(*args, **kwargs), group, {id(partial._value): partial for partial in partials})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Where only compiled kernels arrive that took the tensor past torch's function protocol.

        Raises:
            ModuleError: Always: gradients would be lost without a sign.
        """
        raise ModuleError(
            f"{func} was called from compiled code with a tensor whose gradient is summed over the tensor-parallel "
            "ranks later.",
            fix=_PLAIN_KERNEL,
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PartialTensor({tuple(self._value.shape)}, rank {self._group.rank})"


@one_call
def divided(value: Tensor, group: ShardGroup) -> Tensor:
    """Returns a replicated value whose gradient is divided by the ranks, each of which computes the whole of it."""
    result: Tensor = applied(_Divided, value, group.size)
    return result


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


_PLAIN_KERNEL = (
    "torch.library.custom_op around the kernel, or checkpoint(..., use_reentrant=False) if it is torch's own"
)


# ---- arguments and results ----


def _is_partial(value: Any) -> bool:
    return isinstance(value, PartialTensor)


def _collect(value: Any, found: list[PartialTensor]) -> None:
    """Finds the partial tensors in nested arguments."""
    if isinstance(value, PartialTensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with other tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(each, change) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, change) for key, each in value.items()}
    return value


def _wrapped(result: Any, group: ShardGroup, known: Mapping[int, PartialTensor]) -> Any:
    """A result whose tensors are partial if they want a gradient; what was given back stays what it was."""
    if isinstance(result, Tensor):
        if id(result) in known:
            return known[id(result)]
        return PartialTensor(result, group) if result.requires_grad else result
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return type(result)([_wrapped(each, group, known) for each in result])
    return result


# ---- what is not computed alike on values ----


def _part(whole: PartialTensor, group: ShardGroup, dim: int, segments: tuple[int, ...]) -> Tensor:
    return take(whole._value, dim, segments, group.rank, group.size).clone()


def _copy(value: PartialTensor, group: ShardGroup) -> Tensor:
    return value._value


def _gradient(partial: PartialTensor) -> Tensor | None:
    gradient = partial._value.grad
    return None if gradient is None else nodes.reduce(gradient, partial._group)


def _register_hook(partial: PartialTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Calls a hook with the whole gradient."""
    group = partial._group

    def on_summand(gradient: Tensor) -> Tensor | None:
        changed = hook(nodes.reduce(gradient, group))
        return None if changed is None else changed / group.size

    return partial._value.register_hook(on_summand)


def _backward(function: Callable[..., None]) -> Callable[..., None]:
    """As the function, from whole losses to leaves."""

    def rule(losses: Any, *args: Any, **kwargs: Any) -> None:
        function(_ends(losses), *_replaced(args, _bare), **_replaced(kwargs, _bare))

    return rule


def _ends(losses: Any) -> Any:
    """Whole losses; a checkpoint goes backward from them inside of a backward, where gradients are off."""
    with torch.enable_grad():
        return _replaced(losses, _shared)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Returns whole gradients."""
    given: Sequence[Tensor] = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    found = torch.autograd.grad(
        _ends(outputs), _replaced(given, _bare), *_replaced(args, _shared), **_replaced(kwargs, _shared)
    )
    return tuple(
        nodes.reduce(gradient, cast("PartialTensor", value)._group)
        if _is_partial(value) and gradient is not None
        else gradient
        for value, gradient in zip(given, found, strict=True)
    )


def _shared(value: Tensor) -> Tensor:
    return value.share if isinstance(value, PartialTensor) else value


def _bare(value: Tensor) -> Tensor:
    return value._value if isinstance(value, PartialTensor) else value


_GRADIENT: Any = Tensor.grad
_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        nodes.copy: _copy,
        nodes.part: _part,
        _GRADIENT.__get__: _gradient,
        Tensor.register_hook: _register_hook,
        **{function: _backward(function) for function in (Tensor.backward, torch.autograd.backward)},
        torch.autograd.grad: _grad,
    }
)
