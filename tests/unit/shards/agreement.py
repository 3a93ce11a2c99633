"""Runs a function of tensors on one device and, with some of them cut, on thread ranks: results and gradients agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardOptions
from lightning_3d.shards.layout import take
from lightning_3d.shards.tensor import ShardTensor
from tests.unit.shards.threads import ThreadShardGroup, run_threads, whole

_EXCHANGES = ("sum", "max", "gather", "sum_part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How an argument is cut."""

    dim: int
    segments: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a rank did: exchanges in the forward and backward pass, and functions that gathered."""

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    gathered: frozenset[str]
    cuts: tuple[Any, ...]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def agree(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    cuts: Mapping[int, Cut | int],
    size: int,
    *,
    sequence: bool = False,
    tolerance: float = 1e-12,
    gathers: Sequence[str] = (),
) -> Ran:
    """Asserts that they agree, and that nothing but ``gathers`` was gathered for want of a rule."""
    leaves = [_leaf(each) for each in tensors]
    expected = _outputs(function(*leaves))
    seeds = [random(*out.shape, seed=index) for index, out in enumerate(expected)]
    if any(out.requires_grad for out in expected):
        _loss(expected, seeds).backward()
    layouts = {index: Cut(dim=cut) if isinstance(cut, int) else cut for index, cut in cuts.items()}

    def rank(group: ThreadShardGroup) -> tuple[list[Any], list[Tensor | None], Ran]:
        counts = _counted(group)
        locals_, arguments = [], []
        for index, tensor in enumerate(tensors):
            local = _leaf(_part(tensor, layouts.get(index), group))
            locals_.append(local)
            arguments.append(_argument(local, tensor, layouts.get(index), group))
        results = _outputs(function(*arguments))
        forward = dict(counts)
        counts.clear()
        parts = [_seed_part(seed, out) for seed, out in zip(seeds, results, strict=True)]
        plain = [out._local if isinstance(out, ShardTensor) else out for out in results]
        if any(out.requires_grad for out in plain):
            _loss(plain, parts).backward()
        gathered = frozenset(operation for operation, _ in group._gathers)
        cut = tuple(out.cut if isinstance(out, ShardTensor) else None for out in results)
        ran = Ran(forward=forward, backward=dict(counts), gathered=gathered, cuts=cut)
        return results, [each.grad for each in locals_], ran

    ranks = run_threads(size, rank, options=ShardOptions(sequence=sequence))
    _compare_results([results for results, _, _ in ranks], expected, tolerance)
    for index, leaf in enumerate(leaves):
        _compare_gradients([gradients[index] for _, gradients, _ in ranks], leaf.grad, layouts.get(index), tolerance)
    ran = ranks[0][2]
    assert ran.gathered == frozenset(gathers), ran.gathered
    return ran


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _part(tensor: Tensor, cut: Cut | None, group: ThreadShardGroup) -> Tensor:
    if cut is None:
        return tensor
    return take(tensor, cut.dim, _segments(tensor, cut), group.rank, group.size)


def _segments(tensor: Tensor, cut: Cut) -> tuple[int, ...]:
    return cut.segments or (tensor.shape[cut.dim],)


def _argument(local: Tensor, tensor: Tensor, cut: Cut | None, group: ThreadShardGroup) -> Tensor:
    return local if cut is None else Shard(local, cut.dim, _segments(tensor, cut), group)


def _outputs(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else [each for each in result if each is not None]


def _loss(outputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> Tensor:
    pairs = zip(outputs, seeds, strict=True)
    return sum((out * seed).sum() for out, seed in pairs if out.requires_grad)  # type: ignore[return-value]


def _seed_part(seed: Tensor, out: Any) -> Tensor:
    if not isinstance(out, ShardTensor):
        return seed
    return out.cut.part(seed, out._group.rank, out._group.size)


def _counted(group: ThreadShardGroup) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Tensor]:
        exchange = getattr(group, name)

        def call(*args: Any) -> Tensor:
            counts[name] += 1
            result: Tensor = exchange(*args)
            return result

        return call

    for name in _EXCHANGES:
        setattr(group, name, counting(name))
    return counts


def _compare_results(ranks: Sequence[Sequence[Any]], expected: Sequence[Tensor], tolerance: float) -> None:
    for outs in zip(*ranks, expected, strict=True):
        *results, one = outs
        if isinstance(results[0], ShardTensor):
            cut = results[0].cut
            assert results[0].shape == one.shape
            results = [whole([each._local for each in results], cut.dim, cut.segments)]
        for result in results:
            _close(result.detach(), one.detach(), tolerance)


def _compare_gradients(ranks: Sequence[Tensor | None], one: Tensor | None, cut: Cut | None, tolerance: float) -> None:
    if one is None or not one.any():
        assert all(each is None or not each.any() for each in ranks)
        return
    gradients = [each for each in ranks if each is not None]
    assert len(gradients) == len(ranks)
    if cut is not None:
        gradients = [whole(gradients, cut.dim, cut.segments)]
    for gradient in gradients:
        _close(gradient, one, tolerance)


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    # Sums that cancel are as exact as their terms are large.
    largest = theirs.detach().double().abs().nan_to_num(nan=0.0, posinf=0.0).amax().item() if theirs.numel() else 0.0
    bound = tolerance * max(1.0, largest)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=bound, equal_nan=True)
