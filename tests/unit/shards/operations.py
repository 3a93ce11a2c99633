"""One operation on whole tensors and on shards: the same results, the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from tests.unit.shards.threads import ThreadShardGroup, run_threads

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Operand:
    """A whole tensor and how it is cut; not at all if there is no layout."""

    whole: Tensor
    cut: Layout | None = None

    def leaf(self, gradients: bool) -> Tensor:
        """Returns the whole tensor."""
        return self.whole.clone().requires_grad_(gradients and self.whole.is_floating_point())

    def on(self, group: ThreadShardGroup, gradients: bool) -> tuple[Tensor, Tensor]:
        """Returns a leaf of this rank, and what the operation gets of it."""
        if self.cut is None:
            own = self.leaf(gradients)
            return own, own
        own = self.cut.part(self.whole, group.rank, group.size).clone()
        own.requires_grad_(gradients and own.is_floating_point())
        return own, Shard(own, self.cut.dim, self.cut.segments, group)


def operand(*shape: int, cut: int | None = None, segments: Sequence[int] | None = None, seed: int = 0) -> Operand:
    """Makes an operand of numbers between 0.1 and 0.9."""
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
    return Operand(values, None if cut is None else Layout(cut, tuple(segments or (shape[cut],))))


def check(
    operation: Operation, *operands: Operand, size: int, on_shards: bool | None = True, gradients: bool = True
) -> list[Any]:
    """Asserts that an operation does the same on whole tensors and on shards.

    Args:
        operation: Gets the operands.
        operands: Whole tensors and how they are cut.
        size: Number of ranks.
        on_shards: Whether it has a rule that gives shards, so that nothing is gathered; None if either is right.
        gradients: Whether they are compared too.

    Returns:
        The results of rank 0.
    """
    leaves = [each.leaf(gradients) for each in operands]
    expected = list(_tensors(operation(*leaves)))
    weights = [_weight(each, index) for index, each in enumerate(expected)]
    _backward([each * weight for each, weight in zip(expected, weights, strict=True)])

    def on_rank(group: ThreadShardGroup) -> tuple[list[Any], list[Tensor | None]]:
        owned, given = zip(*(each.on(group, gradients) for each in operands), strict=True)
        results = list(_tensors(operation(*given)))
        assert len(results) == len(expected)
        weighted = [_local(each) * _part(weight, each) for each, weight in zip(results, weights, strict=True)]
        if on_shards:
            assert not group._gathers, f"gathered: {group._gathers}"
            assert any(isinstance(each, Shard) for each in results)
        elif on_shards is False:
            assert group._gathers
        for result, whole in zip(results, expected, strict=True):
            _assert_same(result, whole)
        _backward(weighted)
        return results, [each.grad for each in owned]

    ranks = run_threads(size, on_rank, timeout=20.0)
    for index, (each, whole) in enumerate(zip(operands, leaves, strict=True)):
        for rank, (_, gradients) in enumerate(ranks):
            own = None if whole.grad is None else whole.grad
            if own is not None and each.cut is not None:
                own = each.cut.part(own, rank, size)
            _assert_close(gradients[index], own, f"gradient of operand {index} on rank {rank}")
    return ranks[0][0]


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for each in results:
            yield from _tensors(each)


def _weight(like: Tensor, seed: int) -> Tensor:
    return torch.rand(like.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(99 + seed))


def _local(result: Tensor) -> Tensor:
    return result._local if isinstance(result, Shard) else result


def _part(weight: Tensor, result: Tensor) -> Tensor:
    if not isinstance(result, Shard):
        return weight
    return result.cut.part(weight, result._group.rank, result._group.size)


def _assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if isinstance(result, Shard):
        assert sum(result._segments) == expected.shape[result._dim]
        assert result.cut.fits(result._group.size, padded=True)
    _assert_close(_local(result), _part(expected, result), "result")


def _assert_close(result: Tensor | None, expected: Tensor | None, what: str) -> None:
    if expected is None or result is None:
        assert expected is None or not expected.any(), f"{what}: none"
        assert result is None or not result.any(), f"{what}: unexpected"
        return
    assert result.shape == expected.shape, what
    # Kernels may round otherwise for other sizes.
    loose = {} if result.dtype != torch.float64 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(result, expected, equal_nan=True, msg=lambda text: f"{what}: {text}", **loose)


def _backward(weighted: Sequence[Tensor]) -> None:
    sums = [each.sum() for each in weighted if each.requires_grad]
    if sums:
        torch.stack([each.real for each in sums]).sum().backward()
