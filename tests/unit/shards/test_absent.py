"""Absent parameters: what needs no values is served or does nothing, generators go on, and the rest is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_3d.errors import ModuleError
from lightning_3d.shards.absent import Absent, Arrivals, Elsewhere, absent_parameter, arrivals_of, check_readable

CPU = torch.device("cpu")


def absent(name: str = "w", ranks: Sequence[int] = (1,), arrivals: Arrivals | None = None) -> Any:
    parameter = nn.Parameter(torch.ones(4, 6))
    elsewhere = Elsewhere(name=name, ranks=frozenset(ranks), rank=0)
    return absent_parameter(parameter, elsewhere, CPU, arrivals or Arrivals())


def test_it_is_a_parameter_without_memory() -> None:
    real: Any = nn.Parameter(torch.ones(4, 6), requires_grad=False)
    real.no_decay = True
    made: Any = absent_parameter(real, Elsewhere(name="w", ranks=frozenset({1}), rank=0), CPU, Arrivals())
    assert isinstance(made, nn.Parameter)
    assert made.is_meta
    assert (made.shape, made.dtype, made.device) == (real.shape, real.dtype, CPU)
    assert not made.requires_grad
    assert vars(made) == {"no_decay": True}
    assert made.requires_grad_().is_leaf
    assert not isinstance(made.detach(), nn.Parameter)
    assert repr(made) == f"{made}" == "Absent('w', (4, 6), torch.float32, lies on pipeline rank 1)"


def test_copies_keep_ties_and_know_nothing_of_gradients() -> None:
    net = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])
    arrivals = Arrivals()
    for layer in net:
        layer.weight = absent(arrivals=arrivals)
    net[1].weight = net[0].weight
    arrivals.arrive([])
    copied: Any = copy.deepcopy(net)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not net[0].weight
    assert net[0].weight.grad is not None
    assert copied[0].weight.grad is None
    assert arrivals_of(net) is arrivals
    assert arrivals_of(copied) is not arrivals


def test_files_are_read_without_the_class() -> None:
    file = io.BytesIO()
    torch.save({"parameter": absent(), "tensor": absent().detach()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read["parameter"]) is nn.Parameter
    assert type(read["tensor"]) is Tensor
    assert all(value.is_meta for value in read.values())


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda tensor: tensor.normal_(1.0, 2.0),
    "uniform_": lambda tensor: tensor.uniform_(),
    "bernoulli_": lambda tensor: tensor.bernoulli_(0.3),
    "exponential_": lambda tensor: tensor.exponential_(),
    "randn_like": torch.randn_like,
    "randint_like": lambda tensor: torch.randint_like(tensor, 5),
    "normal": lambda tensor: torch.normal(tensor, 1.0),
    "dropout": nn.functional.dropout,
    "a view": lambda tensor: tensor[1:3].normal_(),
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.trunc_normal_, far": lambda tensor: nn.init.trunc_normal_(tensor, a=1.5, b=3.0),
    "init.orthogonal_": nn.init.orthogonal_,
    "init.sparse_": lambda tensor: nn.init.sparse_(tensor, 0.5),
    "init.constant_": lambda tensor: nn.init.constant_(tensor, 2.0),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
@torch.no_grad()
def test_random_numbers_are_those_of_one_device(draw: Callable[[Tensor], Any]) -> None:
    states = []
    for tensor in (torch.ones(4, 6), absent()):
        torch.manual_seed(1)
        draw(tensor)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@torch.no_grad()
def test_what_acts_on_elements_gives_absent_results() -> None:
    parameter, real = absent(), torch.ones(4, 6)
    for result in (
        parameter.mul_(2),
        parameter.lerp_(absent(), 0.1).clamp_(0, 1),
        parameter.copy_(real),
        parameter.div_(1 + parameter.norm()),
        parameter.detach().clone().double() + real,
        parameter > 0.5,
        torch.zeros_like(parameter),
        sum([real.norm(), parameter.norm()]),
    ):
        assert isinstance(result, Absent)
    parameter[3] = 0.0
    parameter[parameter > 1] = 0.0
    parameter.data = real
    assert torch.equal(parameter.new_zeros(2), torch.zeros(2))
    with pytest.raises(ModuleError, match=r"the data of 'w' were set to a torch.float64 tensor"):
        parameter.data = real.double()
    with pytest.raises(RuntimeError, match="is invalid for input of size 24"):
        parameter.view(5, 5)


@torch.no_grad()
def test_in_lists_what_is_here_is_computed() -> None:
    parameter, real = absent(), torch.ones(4, 6)
    torch._foreach_mul_([parameter, real], 3.0)
    torch._foreach_add_([real, parameter], [real, parameter])
    assert torch.equal(real, torch.full((4, 6), 6.0))
    away, here = torch._foreach_norm([parameter, real])
    assert isinstance(away, Absent)
    assert torch.equal(here, real.norm())
    with pytest.raises(ModuleError, match="_foreach_mul_ on a tensor that has values"):
        torch._foreach_mul_([real], away)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "float": lambda tensor: float(tensor.norm()),
    "bool": lambda tensor: bool(torch.isfinite(tensor).all()),
    "max": lambda tensor: max(tensor.max(), 1.0),
    "format": lambda tensor: f"{tensor.norm():.2f}",
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: np.asarray(tensor.detach()),
    "equal": lambda tensor: torch.equal(tensor, torch.ones(4, 6)),
    "allclose": lambda tensor: torch.allclose(tensor, torch.ones(4, 6)),
    "mixing": lambda tensor: torch.ones(4, 6).lerp_(tensor, 0.1),
    "copying": lambda tensor: torch.ones(4, 6).copy_(tensor),
    "two ranks": lambda tensor: tensor + absent("v", (2,)),
    "transposing in place": lambda tensor: tensor.detach().t_(),
    "poisson": torch.poisson,
}


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED.keys())
@torch.no_grad()
def test_values_are_refused(act: Callable[[Any], Any]) -> None:
    place = "parameter 'w', .* lies on pipeline ranks 1, 3, and this is rank 0"
    with pytest.raises(ModuleError, match=place) as found:
        act(absent(ranks=(3, 1)))
    assert "self.clip_gradients(" in str(found.value)
    assert "strategy.full_tensor('w', p or p.grad)" in str(found.value)


def test_what_is_logged_is_refused_by_its_name() -> None:
    check_readable(torch.ones(()), "log('here')")
    with pytest.raises(ModuleError, match=r"log\('there'\) needs values of parameter 'w'"):
        check_readable(absent().norm(), "log('there')")


def there(parameter: Any) -> bool:
    return parameter.grad is not None


def test_gradients_are_there_as_long_as_this_ranks_own() -> None:
    arrivals, own = Arrivals(), nn.Parameter(torch.ones(2))
    net = nn.Linear(6, 4)
    net.weight = parameter = absent(arrivals=arrivals)
    assert not there(parameter)
    arrivals.arrive([own])
    assert not there(parameter), "they wait"
    own.grad = torch.ones(2)
    assert isinstance(parameter.grad, Absent)
    assert parameter.grad is parameter.grad
    assert parameter.grad.grad is None
    with pytest.raises(ModuleError, match="grad_norm needs values"):
        grad_norm(net, 2)
    net.zero_grad(set_to_none=False)
    assert there(parameter)
    net.zero_grad()
    assert not there(parameter)
    parameter.grad = torch.ones(4, 6)
    assert there(parameter)
    parameter.grad = None
    arrivals.arrive([own])
    assert there(parameter)
    assert not there(parameter.requires_grad_(False))
    parameter.requires_grad_()
    arrivals.clear()
    assert not there(parameter)
