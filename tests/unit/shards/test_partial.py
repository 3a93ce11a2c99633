from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join
from lightning_3d.shards.partial import PartialTensor, divided
from lightning_3d.shards.threads import ThreadShardGroup, run_threads

Use = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDTH = 4


def on_parts(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return (weight * rows).pow(2).sum() + (rows * weight).sum()


def in_a_norm(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return F.layer_norm(rows, (WIDTH,), weight, weight).pow(2).sum()


def on_replicated_values(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return (weight * whole).pow(2).sum() + F.linear(whole, weight.view(1, -1)).sum()


def on_both(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return on_parts(weight, rows, whole) + on_replicated_values(weight, rows, whole)


def as_a_view_of_itself(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return (weight.unsqueeze(0) * rows).pow(2).sum() + weight.exp().sum()


def cut_itself(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return (rows.transpose(0, 1)[:WIDTH] * weight[:, None]).pow(3).sum() + (rows[:WIDTH, 0] * weight).sum()


def in_something_without_a_rule(weight: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    return torch.cdist(rows, weight.view(1, -1)).sum()


def ours(use: Use, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    rows, whole, start = values()

    def step(group: ThreadShardGroup) -> tuple[Tensor, Tensor]:
        leaf = start.clone().requires_grad_()
        part = Shard(rows.chunk(ranks)[group.rank], 0, (len(rows),), group)
        loss = use(PartialTensor(leaf, group), part, whole)
        assert not isinstance(loss, PartialTensor)
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), group.sum(leaf.grad)

    losses, gradients = zip(*run_threads(ranks, step), strict=True)
    return list(losses), list(gradients)


def values() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, WIDTH).double(), torch.randn(3, WIDTH).double(), torch.randn(WIDTH).double()


USES = (
    on_parts,
    in_a_norm,
    on_replicated_values,
    on_both,
    as_a_view_of_itself,
    cut_itself,
    in_something_without_a_rule,
)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_gradients_of_all_ranks_add_up_to_the_whole_one(use: Use, ranks: int) -> None:
    rows, whole, start = values()
    leaf = start.clone().requires_grad_()
    loss = use(leaf, rows, whole)
    loss.backward()
    losses, gradients = ours(use, ranks)
    for mine, gradient in zip(losses, gradients, strict=True):
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


def test_uses_on_parts_need_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []

    def step(group: ThreadShardGroup) -> None:
        plain = group.sum
        group.sum = lambda value: (sums.append(value.numel()), plain(value))[1]  # type: ignore[method-assign]
        leaf = torch.ones(WIDTH, requires_grad=True)
        rows = Shard(torch.randn(2, WIDTH), 0, (4,), group)
        (rows * PartialTensor(leaf, group))._local.sum().backward()

    run_threads(2, step)
    assert sums == []


class Group(ShardGroup):
    """One of two ranks that hold the same."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def sum(self, value: Tensor) -> Tensor:
        return 2 * value

    def max(self, value: Tensor) -> Tensor:
        return value.clone()

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        return join([part, part], dim, segments)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        return 2 * value.chunk(2, dim)[self.rank]


def test_it_looks_like_its_leaf() -> None:
    leaf = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    partial = PartialTensor(leaf, Group())
    assert isinstance(partial, Tensor)
    assert (partial.shape, partial.dtype, partial.device, partial.dim()) == (leaf.shape, leaf.dtype, leaf.device, 2)
    assert partial.requires_grad
    leaf.requires_grad_(False)
    assert not partial.requires_grad
    assert repr(partial) == "PartialTensor((2, 3), rank 1)"


def test_without_gradients_it_is_the_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    partial = PartialTensor(leaf, Group())
    with torch.no_grad():
        partial.mul_(3)
    assert leaf.tolist() == [3.0, 3.0]
    assert partial.detach().data_ptr() == leaf.data_ptr()


def test_nodes_of_parts_take_the_leaf_as_it_is() -> None:
    leaf = torch.ones(4, requires_grad=True)
    partial = PartialTensor(leaf, Group())
    assert nodes.copy(partial, partial._group) is leaf
    nodes.part(partial, partial._group, 0, (4,)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_mode_sees_the_division_as_one_call() -> None:
    seen: list[object] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(2, requires_grad=True)
    with Recorder():
        divided(leaf, Group())
    assert seen == [divided]


def test_compiled_code_is_refused() -> None:
    partial = PartialTensor(torch.ones(2), Group())
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ModuleError, match="compiled code"):
        torch.exp(partial)
