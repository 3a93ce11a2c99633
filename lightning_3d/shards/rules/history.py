"""What autograd keeps of a shard, what is asked of it without its values, and copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.table import Function, RuleTable
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()

# Answered by the local part as by the whole.
_QUESTIONS = (
    "dim get_device is_complex is_conj is_distributed is_floating_point is_inference is_neg is_pinned is_shared "
    "is_signed result_type"
)
# Fresh tensors of any size, of the same type and device: replicated.
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _by_parts(function: Function) -> Function:
    def rule(*args: Any) -> Any:
        return function(*(each._local if isinstance(each, ShardTensor) else each for each in args))

    return rule


def _of_local(function: Function) -> Function:
    def rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        return function(x._local, *args, **kwargs)

    return rule


def _write_down() -> None:
    for name in _QUESTIONS.split():
        for function in dict.fromkeys(getattr(place, name, None) for place in (torch, Tensor)):
            if function is not None:
                table.add(function, _by_parts(function))
    for name in _NEW:
        table.add(getattr(Tensor, name), _of_local(getattr(Tensor, name)))


_write_down()


@table.rule(torch.numel)
def numel(x: ShardTensor) -> int:
    """Elements of the whole."""
    return x.numel()


@table.rule(torch.is_same_size, Tensor.is_same_size)
def is_same_size(x: Tensor, other: Tensor) -> bool:
    """Compares shapes of wholes."""
    return x.shape == other.shape


@table.rule(Tensor.requires_grad_)
def requires_grad_(x: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Says whether a gradient is wanted."""
    x._local.requires_grad_(requires_grad)
    return x


@table.rule(Tensor.retain_grad)
def retain_grad(x: ShardTensor) -> None:
    """Keeps the gradient of what is no leaf."""
    x._local.retain_grad()


@table.rule(Tensor.register_hook)
def register_hook(x: ShardTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Calls a hook with the gradient, which it sees as a shard."""
    # Holds no values: the hook would keep the tensor alive that keeps the hook.
    frame = x.like(x._local.detach().new_empty((0,) * x._local.dim()), x._dim, x._segments)

    def on_part(gradient: Tensor) -> Tensor | None:
        result = hook(frame.like(gradient, frame._dim, frame._segments))
        return None if result is None else frame.part_of(result)

    return x._local.register_hook(on_part)


@table.rule(Tensor.backward)
def backward(
    x: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Computes gradients of leaves."""
    if gradient is None or not isinstance(x, ShardTensor):
        raise Unshardable("there is no gradient to start with")
    own = [_own(each) for each in _several(inputs)] if inputs is not None else None
    x._local.backward(x.part_of(gradient), retain_graph, create_graph, own)


@table.rule(torch.autograd.grad)
def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Returns gradients, those of shards as shards."""
    results, given = _several(outputs), _several(inputs)
    starts = _several(grad_outputs) if grad_outputs is not None else [None] * len(results)
    own = [_own_start(result, start) for result, start in zip(results, starts, strict=True)]
    gradients = torch.autograd.grad(
        [_own(each) for each in results], [_own(each) for each in given], own, *args, **kwargs
    )
    return tuple(
        each.like(found, each._dim, each._segments) if isinstance(each, ShardTensor) and found is not None else found
        for each, found in zip(given, gradients, strict=True)
    )


def _own_start(result: Tensor, gradient: Tensor | None) -> Tensor | None:
    if not isinstance(result, ShardTensor):
        return gradient
    if gradient is None:
        raise Unshardable("there is no gradient to start with")
    return result.part_of(gradient)


def _several(tensors: Any) -> Sequence[Any]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _own(tensor: Any) -> Any:
    return tensor._local if isinstance(tensor, ShardTensor) else tensor


@table.rule(Tensor.__deepcopy__)
def deepcopy(x: ShardTensor, memo: dict[int, Any]) -> ShardTensor:
    """Copies the part."""
    if id(x) not in memo:
        memo[id(x)] = x.like(copy.deepcopy(x._local, memo), x._dim, x._segments)
    copied: ShardTensor = memo[id(x)]
    return copied
