"""Products of matrices: linear maps, products of activations, Einstein sums.

A weight that is cut along its outputs (column) gives a result that is cut along its features. One that is cut along its
inputs (row) meets an input that is cut alike and gives partial results, which are summed over the ranks.
After Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards import nodes
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.entering import cut, entered
from lightning_3d.shards.rules.pointwise import own_operand
from lightning_3d.shards.rules.sequence import summed, whole_sequence
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

# A product of local input, weight and bias.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

table = RuleTable()


@table.rule(F.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map; the weight is (outputs, inputs)."""
    return mapped(x, weight, bias, F.linear, 0)


@table.rule(torch.addmm, Tensor.addmm)
def addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """A linear map; the weight is (inputs, outputs)."""
    _refuse_options("addmm", options, beta=1, alpha=1)
    return mapped(mat1, mat2, bias, _times, 1)


@table.rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)
def matmul(x: Tensor, other: Tensor) -> Tensor:
    """A product of matrices, or of batches of them."""
    if x.dim() == 0 or other.dim() == 0:
        raise Unshardable("a product of matrices with a scalar")
    if other.dim() == 2:
        return mapped(x, other, None, _times, 1)
    if other.dim() == 1:
        return matmul(x, other.unsqueeze(1)).squeeze(-1)
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), other).squeeze(-2)
    return _batches(x, other)


@table.rule(Tensor.__rmatmul__)
def reflected_matmul(x: Tensor, other: Tensor) -> Tensor:
    """A product of matrices, the second one first."""
    return matmul(other, x)


@table.rule(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def bmm(x: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """A product of two matrices, or of two batches of as many matrices."""
    _refuse_options("bmm", options)
    return matmul(x, mat2)


@table.rule(torch.mv, Tensor.mv)
def mv(x: Tensor, vec: Tensor) -> Tensor:
    """A product of a matrix and a vector."""
    return matmul(x, vec)


@table.rule(torch.dot, Tensor.dot)
def dot(x: Tensor, tensor: Tensor) -> Tensor:
    """A product of two vectors."""
    return matmul(x, tensor)


@table.rule(torch.baddbmm, Tensor.baddbmm)
def baddbmm(added: Tensor, batch1: Tensor, batch2: Tensor, **options: Any) -> Tensor:
    """A product of batches of matrices, cut by the matrix, and something added to it."""
    shard = next(each for each in (batch1, batch2, added) if isinstance(each, ShardTensor))
    if shard.dim() - shard._dim != 3:
        raise Unshardable(f"the matrices are cut along {shard.cut} of {shard.dim()}")
    operands = [own_operand(each, shard) for each in (added, batch1, batch2)]
    return shard.like(torch.baddbmm(*operands, **options), 0, shard._segments)


def mapped(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, out_dim: int, sequence_dim: int | None = -2
) -> Tensor:
    """Returns a linear map by a weight that is a matrix.

    Args:
        x: Input.
        weight: Cut along its outputs or inputs, or whole.
        bias: Of the outputs.
        product: Computes it on local tensors.
        out_dim: The weight's dim of outputs.
        sequence_dim: Where a sum of partial results is cut, if it is; None to have it replicated.
    """
    if not isinstance(weight, ShardTensor):
        return _by_whole_weight(x, weight, bias, product)
    if weight.dim() != 2:
        raise Unshardable("the weight is no matrix")
    if weight._dim == out_dim:
        return _by_columns(x, weight, bias, product)
    return _by_rows(x, weight, bias, product, sequence_dim)


def _by_columns(x: Tensor, weight: ShardTensor, bias: Tensor | None, product: Product) -> Tensor:
    whole = whole_sequence(x) if isinstance(x, ShardTensor) else entered(x, weight._group)
    out = product(whole, weight._local, _own_bias(bias, weight))
    return weight.like(out, out.dim() - 1, weight._segments)


def _by_rows(x: Tensor, weight: ShardTensor, bias: Tensor | None, product: Product, sequence_dim: int | None) -> Tensor:
    if isinstance(bias, ShardTensor):
        raise Unshardable("the bias of summed outputs is cut")
    features = x.dim() - 1
    if not isinstance(x, ShardTensor):
        own = cut(x, weight._group, features, weight._segments)
    elif x._dim == features and x._segments == weight._segments:
        own = x._local
    else:
        raise Unshardable(f"the input is cut along {x.cut} of {x.dim()}, the weight's inputs in {weight._segments}")
    weight._group.will_sum(weight._local)
    total = summed(product(own, weight._local, None), weight, dim=sequence_dim)
    if bias is None:
        return total
    # Once, after the sum. Autocast has it in the type of the product.
    return total + (bias if bias.dtype == total.dtype else bias.to(total.dtype))


def _by_whole_weight(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    if not isinstance(x, ShardTensor) or isinstance(bias, ShardTensor):
        raise Unshardable(
            "only the bias is cut" if not isinstance(x, ShardTensor) else "the bias is cut, the weight not"
        )
    if x._dim == x.dim() - 1:
        raise Unshardable("the input's features are cut, the weight is not")
    group = x._group
    out = product(x._local, entered(weight, group), None if bias is None else entered(bias, group))
    return x.like(out, x._dim, x._segments)


def _own_bias(bias: Tensor | None, weight: ShardTensor) -> Tensor | None:
    if bias is None:
        return None
    features = bias.dim() - 1
    if isinstance(bias, ShardTensor):
        if bias._dim != features or bias._segments != weight._segments:
            raise Unshardable(f"the bias is cut along {bias.cut}, the weight along {weight.cut}")
        return bias._local
    if bias.shape[features] == 1:
        return entered(bias, weight._group)
    return cut(bias, weight._group, features, weight._segments)


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x, weight)


def _batches(x: Tensor, other: Tensor) -> Tensor:
    """A product of which one operand has batch dims. Where each is cut is counted from the end, 0 for nowhere."""
    left, right = _place(x), _place(other)
    shard = x if isinstance(x, ShardTensor) else other
    assert isinstance(shard, ShardTensor)
    group, segments = shard._group, shard._segments
    alike = not (left and right) or _segments(x) == _segments(other)
    if max(left, right) > 2:
        if (left and right and left != right) or not alike:
            raise Unshardable("the two batches of matrices are cut in different ways")
        out = torch.matmul(own_operand(x, shard), own_operand(other, shard))
        return shard.like(out, -max(left, right), segments)
    if (left, right) == (2, 0):
        return shard.like(torch.matmul(_local(x), entered(other, group)), -2, segments)
    if (left, right) == (0, 1):
        return shard.like(torch.matmul(entered(x, group), _local(other)), -1, segments)
    if (left, right) == (1, 2) and alike:
        return nodes.reduce(torch.matmul(_local(x), _local(other)), group)
    raise Unshardable(f"the matrices are cut along {_where(x)} and {_where(other)}")


def _place(value: Tensor) -> int:
    return value.dim() - value._dim if isinstance(value, ShardTensor) else 0


def _segments(value: Tensor) -> tuple[int, ...]:
    assert isinstance(value, ShardTensor)
    return value._segments


def _local(value: Tensor) -> Tensor:
    assert isinstance(value, ShardTensor)
    return value._local


def _where(value: Tensor) -> str:
    return f"{value.cut} of {value.dim()}" if isinstance(value, ShardTensor) else "no dim"


def _refuse_options(name: str, options: dict[str, Any], **allowed: Any) -> None:
    for option, given in options.items():
        if given is not None and allowed.get(option) != given:
            raise Unshardable(f"{name} with {option}={given}")


@table.rule(torch.einsum)
def einsum(equation: Any, *operands: Any) -> Tensor:
    """An Einstein sum: linear in every operand, so that one letter may be cut in all operands that have it."""
    tensors = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    inputs, result = _letters(equation, tensors)
    first = next(each for each in tensors if isinstance(each, ShardTensor))
    letter = inputs[next(index for index, each in enumerate(tensors) if each is first)][first._dim]
    summed_over = letter not in result
    own = [
        _own_operand(each, letters, letter, first, summed_over) for each, letters in zip(tensors, inputs, strict=True)
    ]
    out = torch.einsum(equation, *own)
    if summed_over:
        return nodes.reduce(out, first._group)
    return first.like(out, result.index(letter), first._segments)


def _letters(equation: Any, operands: tuple[Any, ...]) -> tuple[list[str], str]:
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise Unshardable("einsum without an equation of the form 'ij,jk->ik'")
    left, result = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    if len(inputs) != len(operands) or any(len(set(letters)) < len(letters) for letters in inputs):
        raise Unshardable("einsum of a diagonal")
    return inputs, result


def _own_operand(value: Tensor, letters: str, letter: str, shard: ShardTensor, summed_over: bool) -> Tensor:
    if isinstance(value, ShardTensor):
        if letters[value._dim] != letter or value._segments != shard._segments:
            raise Unshardable("the operands of einsum are cut in different ways")
        return value._local
    if letter not in letters:
        return entered(value, shard._group)
    if summed_over:
        raise Unshardable("einsum over a dim of which only some operands are cut")
    return cut(value, shard._group, letters.index(letter), shard._segments)
