from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.partial import PartialTensor, divided
from lightning_3d.shards.threads import ThreadShardGroup, run_threads
from tests.unit.shards.twins import Twins

# A vector, rows that are cut, a replicated matrix that wants a gradient, a square weight.
Use = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
WIDTH = 4


def on_parts(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return (vector * rows).pow(2).sum() + (rows * vector).sum()


def in_a_norm(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return F.layer_norm(rows, (WIDTH,), vector, vector).pow(2).sum()


def on_replicated_values(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return (vector * whole).pow(2).sum() + F.linear(whole, vector.view(1, -1)).sum()


def on_both(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return on_parts(vector, rows, whole, square) + on_replicated_values(vector, rows, whole, square)


def in_another_type(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return (rows * (1 + vector.float()).to(rows.dtype)).pow(2).sum()


def as_a_view_of_itself(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return (vector.unsqueeze(0) * rows).pow(2).sum() + vector.exp().sum()


def cut_itself(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return (rows.transpose(0, 1)[:WIDTH] * vector[:, None]).pow(3).sum() + (rows[:WIDTH, 0] * vector).sum()


def in_something_without_a_rule(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return torch.cdist(rows, vector.view(1, -1)).sum()


def of_keys(whole: Tensor, square: Tensor, vector: Tensor) -> Tensor:
    keys = F.linear(whole, square)
    return F.layer_norm(torch.cat([-keys[..., 2:], keys[..., :2]], -1), (WIDTH,), vector)


def through_keys(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        rows.view(1, -1, 2, WIDTH), of_keys(whole, square, vector)[None, None], (whole @ square)[None, None]
    ).sum()


def through_keys_and_elsewhere(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    keys = of_keys(whole, square, vector)
    return (rows.view(-1, 2, WIDTH) @ keys.mT).softmax(-1).pow(2).sum() + (keys * whole).exp().sum()


def in_checkpoints(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    keys = checkpoint(of_keys, whole, square, vector, use_reentrant=False)
    again = checkpoint(lambda whole: of_keys(whole, square, vector).sum(), whole, use_reentrant=True)
    return (rows.view(-1, 2, WIDTH) @ keys.mT).pow(2).sum() + again


def written_to(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    keys = whole @ square
    keys[0] = whole[1]
    keys.mul_(whole)
    plain = whole.clone()
    plain.add_(vector)
    plain[1:] = keys[1:]
    torch.mul(plain.detach(), 2, out=torch.empty_like(plain))
    return (rows.view(-1, 2, WIDTH) @ keys.mT).pow(2).sum() + plain.pow(3).sum()


def split_in_parts(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    one, other = (square @ whole.mT).split(2)
    largest = torch.max(torch.stack([one, other]), 0)
    assert type(largest) is torch.return_types.max
    return (rows[:, :3] * largest.values[0]).pow(2).sum() + one.sum()


def with_its_own_gradients(vector: Tensor, rows: Tensor, whole: Tensor, square: Tensor) -> Tensor:
    loss = (rows * vector).pow(3).sum() + (whole * vector).exp().sum()
    found = torch.autograd.grad(loss, (vector, whole), create_graph=True)
    return loss + sum(gradient.pow(2).sum() for gradient in found)


USES = (
    on_parts,
    in_a_norm,
    on_replicated_values,
    on_both,
    in_another_type,
    as_a_view_of_itself,
    cut_itself,
    in_something_without_a_rule,
    through_keys,
    through_keys_and_elsewhere,
    in_checkpoints,
    written_to,
    split_in_parts,
    with_its_own_gradients,
)


def plain(value: Tensor) -> Tensor:
    return value.share if isinstance(value, PartialTensor) else value


def ours(use: Use, ranks: int) -> list[list[Tensor]]:
    """What the ranks find: the loss, and gradients of the vector, the replicated matrix and the square weight."""
    rows, *others = values()

    def step(group: ThreadShardGroup) -> list[Tensor]:
        vector, whole, square = (other.clone().requires_grad_() for other in others)
        part = Shard(rows.chunk(ranks)[group.rank], 0, (len(rows),), group)
        loss = plain(use(PartialTensor(vector, group), part, whole, PartialTensor(square, group)))
        loss.backward()
        summed = [group.sum(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for leaf in (vector, square)]
        return [loss.detach(), *summed, torch.zeros_like(whole) if whole.grad is None else whole.grad]

    return run_threads(ranks, step)


def values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (12, WIDTH), (WIDTH,), (3, WIDTH), (WIDTH, WIDTH)
    rows, vector, whole, square = (torch.randn(shape).double() for shape in shapes)
    return rows, vector, whole, square


def expected_of(use: Use) -> list[Tensor]:
    rows, *others = values()
    vector, whole, square = leaves = [other.clone().requires_grad_() for other in others]
    loss = use(vector, rows, whole, square)
    loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [loss.detach(), gradients[0], gradients[2], gradients[1]]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_gradients_of_all_ranks_add_up_to_the_whole_one(use: Use, ranks: int) -> None:
    expected = expected_of(use)
    tolerance = 1e-6 if use is in_another_type else 1e-12
    for found in ours(use, ranks):
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)


def sums_of(use: Use) -> int:
    """How many sums rank 0 takes part in, forward and backward."""
    rows, *others = values()

    def step(group: ThreadShardGroup) -> int:
        vector, whole, square = (other.clone().requires_grad_() for other in others)
        part = Shard(rows.chunk(2)[group.rank], 0, (len(rows),), group)
        sums: list[int] = []
        own = group.sum
        group.sum = lambda value: (sums.append(value.numel()), own(value))[1]  # type: ignore[method-assign]
        loss = plain(use(PartialTensor(vector, group), part, whole, PartialTensor(square, group)))
        loss.backward()
        return len(sums)

    return run_threads(2, step)[0]


def test_uses_on_parts_are_summed_where_they_come_from() -> None:
    # The loss.
    assert sums_of(lambda vector, rows, whole, square: (rows * vector).sum()) == 1
    # And the replicated input that keys and values share.
    assert sums_of(through_keys) == 2


def ones(*shape: int) -> PartialTensor:
    return PartialTensor(torch.ones(shape, requires_grad=True), Twins(1))


def test_it_looks_like_its_value() -> None:
    leaf = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    partial = PartialTensor(leaf, Twins(1))
    assert isinstance(partial, Tensor)
    assert (partial.shape, partial.dtype, partial.device, partial.dim()) == (leaf.shape, leaf.dtype, leaf.device, 2)
    assert partial.requires_grad
    leaf.requires_grad_(False)
    assert not partial.requires_grad
    assert repr(partial) == "PartialTensor((2, 3), rank 1)"


def test_results_that_want_no_gradient_are_plain() -> None:
    partial = ones(2)
    for result in (partial.detach(), partial > 0, partial.argmax(), partial.data, torch.zeros_like(partial)):
        assert type(result) is Tensor
    with torch.no_grad():
        assert type(partial + 1) is Tensor
    assert (partial + 1).sum().item() == 4.0


def test_without_gradients_it_is_its_value() -> None:
    partial = ones(2)
    with torch.no_grad():
        assert partial.mul_(3) is partial
    assert partial.value.tolist() == [3.0, 3.0]
    assert partial.detach().data_ptr() == partial.value.data_ptr()


def test_what_does_nothing_gives_the_same_tensor_back() -> None:
    keys = ones(2, 2) * 2
    assert keys.contiguous() is keys
    assert F.dropout(keys, 0.5, training=False) is keys
    assert keys.mul_(2) is keys


def test_a_frozen_one_meets_values_that_want_a_gradient() -> None:
    weight = PartialTensor(torch.ones(2), Twins(1))
    x = torch.ones(2, requires_grad=True)
    product = x * weight
    assert isinstance(product, PartialTensor)
    product.share.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


def test_nodes_of_parts_take_the_value_as_it_is() -> None:
    partial = ones(4)
    leaf = partial.value
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
        divided(leaf, Twins(1))
    assert seen == [divided]


def test_hooks_and_kept_gradients_are_whole() -> None:
    seen: list[Tensor] = []
    partial = ones(2)
    keys = partial * 3
    keys.register_hook(lambda gradient: (seen.append(gradient), 10 * gradient)[1])
    keys.retain_grad()
    (keys * torch.tensor([1.0, 2.0])).share.sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[1.0, 2.0]]
    assert keys.grad is not None
    assert keys.grad.tolist() == [10.0, 20.0]
    assert partial.value.grad is not None
    assert partial.value.grad.tolist() == [15.0, 30.0]


def test_backward_from_it_is_from_a_whole_loss() -> None:
    partial = ones(2)
    (partial * 3).sum().backward()
    (partial * 3).backward(torch.ones(2))
    torch.autograd.backward([partial * 3], [torch.ones(2)], inputs=[partial])
    assert partial.value.grad is not None
    assert partial.value.grad.tolist() == [4.5, 4.5]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_custom_function_that_is_given_one_is_refused() -> None:
    with pytest.raises(ModuleError, match="custom autograd function Doubled was given a tensor whose gradient"):
        Doubled.apply(ones(2))


def test_compiled_code_is_refused() -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ModuleError, match="compiled code"):
        torch.exp(ones(2))
