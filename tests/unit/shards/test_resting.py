"""Parameters between steps: what is served gives the part of what one device has, and the rest is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ModuleError
from lightning_3d.shards.resting import Resting, let_rest
from tests.spmd.packed import Stack, cut_over, cuts_of, expected_part, mesh_of
from tests.unit.worlds import fake_world

PACKED, COLUMN, PADDED = "blocks.0.fused.weight", "blocks.0.column.weight", "words.weight"


@contextmanager
def resting(data: int, tensor: int, rank: int = 0) -> Iterator[Stack]:
    """A module that is cut, at rest; its weights are those of the seed."""
    spec = mesh_of(data, tensor)
    torch.manual_seed(1)
    with fake_world(data * tensor, rank):
        module = cut_over(Stack(), spec)
        let_rest(module, cuts_of(tensor) if tensor > 1 else {}, "tensor_parallel")
        with torch.no_grad():
            yield module


def assign(tensor: Tensor, values: Tensor) -> None:
    tensor.data = values


def write(index: Any) -> Callable[[Tensor, Tensor], None]:
    def set_item(tensor: Tensor, values: Tensor) -> None:
        tensor[index] = values[index]

    return set_item


def write_masked(tensor: Tensor, values: Tensor) -> None:
    tensor[values > 0] = 3.0


def average(tensor: Tensor, values: Tensor) -> None:
    torch._foreach_lerp_([tensor, tensor.data], [tensor * 2, values], 0.5)


def scaled(tensor: Tensor, values: Tensor) -> None:
    (doubled,) = torch._foreach_mul([tensor], [2.0])
    tensor.copy_(doubled)


# What changes a tensor, given other whole values.
SERVED: dict[str, Callable[[Any, Tensor], Any]] = {
    "fill_": lambda tensor, values: tensor.fill_(0.1),
    "zero_": lambda tensor, values: tensor.zero_(),
    "numbers": lambda tensor, values: tensor.mul_(0.5).add_(1),
    "a number in a tensor": lambda tensor, values: tensor.mul_(torch.tensor(3.0)),
    "copy_ of the whole": lambda tensor, values: tensor.copy_(values),
    "lerp_ to the whole": lambda tensor, values: tensor.lerp_(values, 0.1),
    "a row of the whole": lambda tensor, values: tensor.add_(values[:1]),
    "data = whole": assign,
    "data = a new one": lambda tensor, values: assign(tensor, 0.9 * tensor.data + 0.1 * values),
    "data": lambda tensor, values: tensor.data.mul_(2),
    "detach": lambda tensor, values: tensor.detach().add_(values),
    "first": write(0),
    "last": write((..., -1)),
    "slice": write(slice(-2, None)),
    "list": write([0, -1]),
    "all": write(slice(None)),
    "mask of the whole": write_masked,
    "masked_fill_": lambda tensor, values: tensor.masked_fill_(tensor > 0, 1.0),
    "masked_fill_ by the whole": lambda tensor, values: tensor.masked_fill_(values > 0, 1.0),
    "clone": lambda tensor, values: tensor.copy_(tensor.clone() * values + tensor),
    "where": lambda tensor, values: tensor.copy_(torch.where(tensor > 0, tensor, values)),
    "other dtypes": lambda tensor, values: tensor.copy_(tensor.double().exp().float()),
    "noise": lambda tensor, values: tensor.add_(torch.randn_like(tensor)),
    "init": lambda tensor, values: nn.init.trunc_normal_(tensor, std=0.02),
    "lists": average,
    "lists of results": scaled,
}


# The first rank of an axis and the last, which has the padding and may hold nothing of a short tensor.
PLACES = [(1, 2, 0), (1, 2, 1), (2, 1, 0), (2, 1, 1), (2, 2, 0), (2, 2, 3), (3, 2, 2), (3, 2, 5)]


@pytest.mark.parametrize(("data", "tensor", "rank"), PLACES)
def test_served(data: int, tensor: int, rank: int) -> None:
    spec, layouts = mesh_of(data, tensor), cuts_of(tensor) if tensor > 1 else {}
    torch.manual_seed(1)
    whole = {name: parameter.detach() for name, parameter in Stack().named_parameters()}
    with resting(data, tensor, rank) as module:
        parameters: dict[str, Any] = dict(module.named_parameters())
        started = {name: parameter._local_tensor.clone() for name, parameter in parameters.items()}
        for form, change in SERVED.items():
            for name, parameter in parameters.items():
                parameter._local_tensor.copy_(started[name])
                expected = whole[name].clone()
                if not (form in ("slice", "list") and len(expected) < 2):
                    values = torch.randn_like(expected)
                    for each in (expected, parameter):
                        torch.manual_seed(2)
                        change(each, values)
                part = expected_part(expected, spec, rank, layouts.get(name))
                torch.testing.assert_close(parameter._local_tensor, part, msg=f"{form}: {name}")


def foreign(tensor: Any) -> DTensor:
    """A user's own DTensor, whose rows need not be those of a parameter."""
    return DTensor.from_local(tensor._local_tensor, tensor.device_mesh, tensor.placements, run_check=False)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# What has no exact form on parts that lie in another order than the whole.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda tensor: tensor[:2],
    "rows of data": lambda tensor: tensor.data[:2].mul_(2),
    "rows of a copy": lambda tensor: tensor.detach().clone()[0],
    "rows by number": lambda tensor: tensor[torch.tensor([1, 2])],
    "view": lambda tensor: tensor.view(3, -1, tensor.shape[-1]),
    "narrow": lambda tensor: tensor.narrow(0, 0, 2),
    "chunk": lambda tensor: tensor.chunk(3),
    "transpose": lambda tensor: tensor.t(),
    "product": lambda tensor: tensor @ torch.ones(tensor.shape[-1]),
    "sum of rows": lambda tensor: tensor.sum(0),
    "place of the largest": lambda tensor: tensor.argmax(),
    "rows of other shapes": lambda tensor: tensor + torch.ones(3, *tensor.shape),
    "into the whole": lambda tensor: torch.zeros(tensor.shape).lerp_(tensor, 0.1),
    "into a list of wholes": lambda tensor: torch._foreach_add_([torch.zeros(tensor.shape)], [tensor]),
    "redistribute": lambda tensor: tensor.redistribute(tensor.device_mesh, tensor.placements),
    "data of another shape": lambda tensor: assign(tensor, torch.zeros(2)),
    "data of another dtype": lambda tensor: assign(tensor, tensor.data.half()),
    "a gradient of others": lambda tensor: setattr(tensor, "grad", foreign(tensor)),
    "pickle": lambda tensor: saved(tensor),
    "pickle of data": lambda tensor: saved({"weight": tensor.data}),
    "pickle of a copy": lambda tensor: saved([tensor.clone()]),
    "a distributed checkpoint": lambda tensor: create_default_local_save_plan({"weight": tensor}, True),
    "into a distributed checkpoint": lambda tensor: tensor.__create_chunk_list__(),
    "another DTensor": lambda tensor: tensor.add_(foreign(tensor)),
}


@pytest.mark.parametrize("data", [1, 2])
def test_refused_of_packed_ones(data: int) -> None:
    with resting(data, 2) as module:
        parameter: Any = module.get_parameter(PACKED)
        before = parameter._local_tensor.clone()
        for form, refused in REFUSED.items():
            with pytest.raises(ModuleError, match=rf"'{PACKED}'"):
                refused(parameter)
            assert torch.equal(parameter._local_tensor, before), form


def test_the_refusal_says_what_to_do() -> None:
    with resting(1, 2) as module, pytest.raises(ModuleError) as caught:
        module.get_parameter(PACKED)[:2]
    text = str(caught.value)
    assert f"slice on parameter '{PACKED}'" in text
    assert "8|8|8" in text
    assert f"trainer.strategy.full_tensor('{PACKED}', tensor)" in text


# What torch would do to a copy of what it has gathered, or not at all.
LOST: dict[str, Callable[[Any], Any]] = {
    "rows": lambda tensor: tensor[:2].mul_(2),
    "a row": lambda tensor: tensor[3].fill_(0.0),
    "chunk": lambda tensor: tensor.chunk(2)[0].mul_(2),
    "rows of rows": lambda tensor: tensor[:4][1:].zero_(),
    "whole values": lambda tensor: torch.zeros(tensor.shape).add_(tensor),
}


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)], ids=str)
def test_refused_of_cut_ones(mesh: tuple[int, int]) -> None:
    with resting(*mesh) as module:
        for lost in LOST.values():
            with pytest.raises(ModuleError, match=COLUMN):
                lost(module.get_parameter(COLUMN))


def test_windows_on_own_memory_are_torchs() -> None:
    with resting(1, 2) as module:
        parameter: Any = module.get_parameter(COLUMN)
        before = parameter._local_tensor.clone()
        parameter[:, 0].mul_(2)
        parameter.t()[1:, :].add_(1)
        before[:, 0] *= 2
        before[:, 1:] += 1
        assert torch.equal(parameter._local_tensor, before)


@pytest.mark.parametrize("name", [PACKED, COLUMN, PADDED])
def test_what_is_computed_stays_guarded(name: str) -> None:
    with resting(2, 2) as module:
        parameter: Any = module.get_parameter(name)
        # As FSDP2 and the tensor axis make gradients.
        parameter.grad = DTensor.__new__(DTensor, parameter._local_tensor + 1, parameter._spec, requires_grad=False)
        others = [parameter.data, parameter.detach(), parameter.grad, parameter.grad.data, parameter > 0]
        others += [torch.zeros_like(parameter), parameter.clone().mul(2), copy.deepcopy(parameter)]
        for other in others:
            assert type(other) is Resting
            assert other._held is parameter._held
        assert isinstance(parameter, nn.Parameter)


def test_a_whole_gradient_is_cut() -> None:
    with resting(1, 2, rank=1) as module:
        parameter: Any = module.get_parameter(PACKED)
        whole = torch.randn(24, 7)
        parameter.grad = whole
        assert torch.equal(parameter.grad._local_tensor, expected_part(whole, mesh_of(1, 2), 1, cuts_of(2)[PACKED]))
        parameter.grad = None
        assert parameter.grad is None


@pytest.mark.parametrize("name", [PACKED, COLUMN])
def test_gradients_held_alike_are_taken(name: str) -> None:
    with resting(2, 2) as module:
        parameter: Any = module.get_parameter(name)
        parameter.grad = torch.ones_like(parameter) * 2
        parameter.grad = parameter.grad.clone()
        assert parameter.grad._local_tensor.eq(2).all()


def test_a_gradient_of_a_cut_one_may_be_the_users() -> None:
    with resting(2, 2) as module:
        parameter: Any = module.get_parameter(COLUMN)
        parameter.grad = foreign(parameter)
        assert type(parameter.grad) is Resting


def test_the_refusal_to_save_says_how_to() -> None:
    with resting(1, 2) as module, pytest.raises(ModuleError) as caught:
        saved({"weight": module.get_parameter(PACKED)})
    text = str(caught.value)
    assert "trainer.save_checkpoint(path)" in text
    assert f"trainer.strategy.full_tensor('{PACKED}', tensor)" in text


def test_padding_stays_zero() -> None:
    with resting(1, 2, rank=1) as module:
        parameter: Any = module.get_parameter(PADDED)
        parameter.fill_(2.0)
        torch._foreach_add_([parameter], 1.0)
        assert parameter._local_tensor[-1].eq(0).all()
        assert parameter.exp()._local_tensor[-1].eq(0).all()
        assert parameter._local_tensor[:-1].eq(3).all()
        with pytest.raises(ModuleError, match="mean"):
            parameter.mean()


@pytest.mark.parametrize("reduction", ["sum", "norm", "mean", "max"])
def test_reductions_of_all_are_numbers_of_the_whole(reduction: str) -> None:
    with resting(1, 2) as module:
        for name in (PACKED, COLUMN):
            assert type(getattr(module.get_parameter(name), reduction)()) is torch.Tensor
        column: Any = module.get_parameter(COLUMN)
        product = column @ column.t()
        assert isinstance(product, DTensor)
        assert type(getattr(product.view(-1), reduction)()) is torch.Tensor


def test_uneven_parts_are_flattened_as_a_whole() -> None:
    with resting(2, 1) as module:
        weight = module.get_parameter(PADDED)
        flat: Any = weight.flatten()
        assert flat.shape == (weight.numel(),)
        assert flat.full_tensor().shape == flat.shape
        with pytest.raises(ModuleError, match=PADDED):
            flat.mul_(2)


def test_equal() -> None:
    with resting(1, 2) as module:
        packed = module.get_parameter(PACKED)
        assert torch.equal(packed, packed.clone())
        assert not torch.equal(packed, module.get_parameter(COLUMN))


OPTIMIZERS: list[Callable[[list[Any]], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, foreach=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
]


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_optimizers(mesh: tuple[int, int]) -> None:
    spec, layouts = mesh_of(*mesh), cuts_of(mesh[1]) if mesh[1] > 1 else {}
    torch.manual_seed(1)
    whole = Stack()
    with resting(*mesh, rank=1) as module:
        pairs = dict(zip(module.parameters(), whole.parameters(), strict=True))
        for index, make in enumerate(OPTIMIZERS):
            optimizers = [make([*pairs]), make([*pairs.values()])]
            for _ in range(3):
                for parameter, one in pairs.items():
                    one.grad = torch.randn_like(one)
                    parameter.grad = one.grad
                for optimizer in optimizers:
                    optimizer.step()
            for (name, parameter), one in zip(module.named_parameters(), whole.parameters(), strict=True):
                part = expected_part(one.detach(), spec, 1, layouts.get(name))
                torch.testing.assert_close(cast(Any, parameter)._local_tensor, part, msg=f"{index}: {name}")


def test_files_do_not_name_the_class() -> None:
    with resting(1, 2) as module:
        kind, *_ = module.get_parameter(COLUMN).__reduce_ex__(2)
        assert b"resting" not in saved(kind)
