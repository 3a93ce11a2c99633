"""Shards and autograd: hooks, gradients of gradients, foreign functions; values that leave; copies."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.shards import nodes
from lightning_3d.shards.executor import Shard
from tests.unit.shards.operations import check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

WHOLE = torch.arange(8, dtype=torch.float64).view(4, 2) / 8 + 0.1


def on_ranks(test: Callable[[ThreadShardGroup, Shard], None]) -> None:
    """Runs a test on two ranks with a leaf that is cut along its first dim."""

    def on_rank(group: ThreadShardGroup) -> None:
        own = WHOLE[2 * group.rank :][:2].clone().requires_grad_()
        test(group, Shard(own, 0, (4,), group))

    run_threads(2, on_rank)


def part(whole: Tensor, group: ThreadShardGroup) -> Tensor:
    return whole[2 * group.rank :][:2]


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda gradient: gradient * 2,
    "by the norm of all": lambda gradient: gradient / gradient.norm(),
    "along the cut dim": lambda gradient: gradient.flip(0),
    "replicated": lambda gradient: torch.ones(4, 2, dtype=gradient.dtype),
    "nothing": lambda gradient: None,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_global_gradients(name: str) -> None:
    shapes: list[Any] = []

    def operation(x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(lambda gradient: shapes.append(gradient.shape) or HOOKS[name](gradient))
        x.register_hook(HOOKS[name])
        return y.sin()

    check(operation, operand(4, 2, cut=0), size=2)
    assert set(shapes) == {(4, 2)}


def test_a_hook_may_return_another_cut() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        other = torch.arange(8, dtype=torch.float64).view(4, 2)
        handle = x.register_hook(lambda _: Shard(other[:, group.rank :][:, :1], 1, (2,), group))
        (x * 1)._local.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad._local, part(other, group))
        handle.remove()
        x.grad = None
        (x * 1)._local.sum().backward()
        assert torch.equal(x.grad._local, torch.ones(2, 2))

    on_ranks(test)


def test_hooks_keep_nothing_alive() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        y = x * 2
        y.register_hook(lambda gradient: gradient)
        alive = weakref.ref(y._local)
        del y
        assert alive() is None

    on_ranks(test)


def test_leaves_and_their_gradients() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        assert x.is_leaf
        assert x.grad is None
        y = x * 2
        y.retain_grad()
        assert y.requires_grad
        assert y.grad_fn is y._local.grad_fn
        y.backward(WHOLE, retain_graph=True)
        for each, factor in ((y, 1), (x, 2)):
            assert isinstance(each.grad, Shard)
            assert each.grad.shape == (4, 2)
            assert torch.equal(each.grad._local, factor * part(WHOLE, group))
        y.backward(y.detach(), inputs=[x])
        x.grad = WHOLE
        assert torch.equal(x._local.grad, part(WHOLE, group))
        x.grad = None
        assert x._local.grad is None
        z = x.detach()
        assert not z.requires_grad
        assert z.requires_grad_() is z
        z.requires_grad = False
        assert not z._local.requires_grad
        assert not group._gathers

    on_ranks(test)


def test_data() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        assert isinstance(x.data, Shard)
        assert not x.data.requires_grad
        x.data.mul_(2)
        assert torch.equal(x._local, 2 * part(WHOLE, group))
        x.data = x.data + 1
        assert torch.equal(x._local, 2 * part(WHOLE, group) + 1)
        x.data = WHOLE
        assert torch.equal(x._local, part(WHOLE, group))
        assert x.requires_grad

    on_ranks(test)


def test_backward_of_a_shard_without_a_gradient_is_torchs_error() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            (x * 2).backward()

    on_ranks(test)


def second(x: Tensor, weight: Tensor) -> Any:
    """Gradients of a penalty on gradients, through every node."""
    y = (x * weight).tanh()
    loss = (y.sin() * y).flip(0).sum() + y.detach().sum()
    gradients = torch.autograd.grad(loss, (x, weight), create_graph=True)
    more = torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)
    return gradients[0] * 1, more[0] * weight, gradients[1] * 1


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (2,)])
def test_gradients_of_gradients(shape: tuple[int, ...]) -> None:
    check(second, operand(4, 2, cut=0), operand(*shape, seed=1), size=2, on_shards=None)


@pytest.mark.parametrize("segments", [(4,), (2, 2)])
def test_the_nodes_are_adjoint_to_each_other(segments: tuple[int, ...]) -> None:
    """A gradient of a gradient through each node, against finite differences over the ranks."""

    def on_rank(group: ThreadShardGroup) -> None:
        def weigh(value: Tensor, seed: int) -> Tensor:
            return value * torch.rand(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(seed))

        def function(x: Tensor) -> Tensor:
            partial = weigh(nodes.copy(x, group), group.rank)
            cut = nodes.reduce_part(partial**3, group, 0, segments)
            whole = nodes.gather_sum(cut.sin(), group, 0, segments)
            total = nodes.reduce(weigh(whole, 2 + group.rank) ** 2, group)
            own = nodes.part(total, group, 0, segments)
            return weigh(nodes.gather(own.exp(), group, 0, segments), 5)

        x = WHOLE.flatten()[:4].clone().requires_grad_()
        torch.autograd.gradcheck(function, x)
        torch.autograd.gradgradcheck(function, x)

    run_threads(2, on_rank)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class AsMethod(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()


class Reversal(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("function", [StraightThrough, AsMethod])
def test_foreign_functions_are_refused(function: Any) -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        for given in (x, x * 2):
            with pytest.raises(ModuleError, match=rf"{function.__name__} was given.*test_history\.py:\d+"):
                function.apply(given)
        assert function.apply(x.detach()).shape == (4, 2)

    on_ranks(test)


def test_a_foreign_function_that_returns_its_input_is_refused() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        with pytest.raises(ModuleError):
            Reversal.apply(x * 2)

    on_ranks(test)


def test_checkpoints() -> None:
    def test(group: ThreadShardGroup, weight: Shard) -> None:
        def function(x: Tensor) -> Tensor:
            return nodes.gather((weight * nodes.copy(x, group)).tanh()._local, group, 0, (4,))

        x = WHOLE.clone().requires_grad_()
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        for reentrant in (True, False):
            weight._local.grad = x.grad = None
            checkpoint(function, x, use_reentrant=reentrant).sum().backward()
            assert torch.equal(x.grad, expected)
            assert weight.grad is not None
        with pytest.raises(ModuleError, match="use_reentrant=False"):
            checkpoint(lambda x: x * 2, weight, use_reentrant=True)

    on_ranks(test)


def test_values_that_leave() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        assert x.tolist() == WHOLE.tolist()
        assert np.array_equal(x.detach().numpy(), WHOLE.numpy())
        assert np.array_equal(np.asarray(x.detach()), WHOLE.numpy())
        assert [row.tolist() for row in x] == WHOLE.tolist()
        assert 0.1 in x
        assert x.detach().argmax().item() == 7
        with pytest.raises(RuntimeError):
            x.item()
        for number in (bool, float, int):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                number(x)
        assert torch.equal(pickle.loads(pickle.dumps(x.detach())), WHOLE)

    on_ranks(test)


def test_printing_waits_for_nobody() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        if group.rank == 0:
            assert f"{x}" == str(x) == repr(x) == "Shard((4, 2), dim 0, rank 0)"

    on_ranks(test)


def test_copies() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        first, second = copy.deepcopy([x, x])
        assert first is second
        assert isinstance(first, Shard)
        assert first.cut == x.cut
        assert first.requires_grad
        assert torch.equal(first._local, x._local)
        assert first._local is not x._local
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(x * 2)

    on_ranks(test)


def test_questions() -> None:
    def test(group: ThreadShardGroup, x: Shard) -> None:
        assert x.shape == x.size() == (4, 2)
        assert (x.size(0), x.size(-1), x.dim(), x.ndim, x.numel(), torch.numel(x), len(x)) == (4, 2, 2, 2, 8, 8, 4)
        assert (x.nbytes, x.element_size(), x.itemsize, x.dtype) == (64, 8, 8, torch.float64)
        assert x.stride() == (2, 1)
        assert x.T.stride() == (1, 2)
        assert x.unsqueeze(1).expand(4, 3, 2).stride() == (2, 0, 1)
        assert x.stride(0) == 2
        assert x.is_contiguous()
        assert not x.T.is_contiguous()
        assert torch.is_tensor(x)
        assert isinstance(x, Tensor)
        assert torch.is_floating_point(x)
        assert not torch.is_complex(x)
        assert torch.result_type(x, torch.ones(1)) == torch.float64
        assert torch.is_same_size(x, WHOLE)
        assert x.is_signed()
        assert x.layout == torch.strided
        assert x.device == WHOLE.device
        assert x.get_device() == -1
        assert not x.is_cuda
        assert x.new_zeros(3, 5).shape == (3, 5)
        assert type(x.new_ones(2)) is Tensor
        assert hash(x) == id(x)
        assert not group._gathers

    on_ranks(test)
