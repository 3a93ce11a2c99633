from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.shards import executor
from lightning_3d.shards.group import ProcessShardGroup
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.partial import PartialTensor

RANK, CPU = 1, torch.device("cpu")
Apply = Callable[..., TensorState]


@pytest.fixture
def cut(tensor_mesh: DeviceMesh) -> Apply:
    group = ProcessShardGroup(tensor_mesh.get_group())

    def apply(module: nn.Module, layouts: dict[str, Layout] | None = None, **options: Any) -> TensorState:
        return apply_tensor(module, layouts or {}, tensor_mesh, group, device=CPU, **options)

    return apply


def local(tensor: Any) -> Tensor:
    return tensor._local_tensor


def test_parameters_become_dtensors_under_their_names(cut: Apply) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    net[1].bias.requires_grad_(False)
    net[0].weight.mark = "kept"
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    cut(net, {"0.weight": Layout(0, (2, 2)), "1.weight": Layout(1, (4,))})
    assert list(net.state_dict()) == list(before)
    placements = {name: parameter.placements[0] for name, parameter in net.named_parameters()}
    assert placements == {"0.weight": Shard(0), "0.bias": Replicate(), "1.weight": Shard(1), "1.bias": Replicate()}
    assert torch.equal(local(net[0].weight), before["0.weight"][[1, 3]])
    assert torch.equal(local(net[1].weight), before["1.weight"][:, 2:])
    assert net[0].weight.shape == (4, 2)
    assert (net[0].weight.mark, net[0].weight.requires_grad, net[1].bias.requires_grad) == ("kept", True, False)
    assert type(net[0].weight) is type(nn.Parameter(net[0].weight))


def test_parts_have_memory_of_their_own_and_the_whole_is_freed(cut: Apply) -> None:
    layer = nn.Linear(8, 8, bias=False)
    whole = weakref.ref(layer.weight)
    cut(layer, {"weight": Layout(0, (8,))})
    assert local(layer.weight).untyped_storage().nbytes() == 4 * 8 * 4
    assert whole() is None


def test_meta_stays_meta(cut: Apply) -> None:
    layer = nn.Linear(4, 4, device="meta")
    cut(layer, {"weight": Layout(1, (4,))})
    assert layer.weight.is_meta
    assert (layer.weight.shape, local(layer.weight).shape) == ((4, 4), (4, 2))


def test_a_step_reads_leaves(cut: Apply) -> None:
    layer = nn.Linear(2, 4)
    state = cut(layer, {"weight": Layout(0, (4,))})
    assert isinstance(layer.weight, DTensor)
    with state.activity:
        with state.activity:
            assert isinstance(layer.weight, executor.Shard)
        assert layer.weight.cut == Layout(0, (4,))
        assert layer.weight is layer.weight
        assert (type(layer.bias), layer.bias.is_leaf) == (Tensor, True)
        assert state.read(layer, "weight") is layer.weight._local
        assert state.read(layer, "weight").data_ptr() == local(layer._parameters["weight"]).data_ptr()
        assert list(layer.parameters()) == [layer._parameters["weight"], layer._parameters["bias"]]
    assert layer.weight is layer._parameters["weight"]


def test_a_step_that_fails_is_over(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    state = cut(layer)
    with pytest.raises(ZeroDivisionError), state.activity:
        _ = 1 / 0
    assert not state.activity
    assert isinstance(layer.weight, DTensor)


def test_what_the_user_has_compiled_runs_as_it_is_in_a_step(cut: Apply) -> None:
    torch._dynamo.reset()
    counters.clear()
    layer, other = nn.Linear(2, 4), torch.compile(nn.Linear(2, 2), backend="eager")
    state = cut(layer, {"weight": Layout(0, (4,))})

    def use() -> Tensor:
        return torch.compile(layer, backend="eager")(other(torch.ones(1, 2)))

    assert state.visit(use).shape == (1, 4)
    with state.activity:
        assert state.visit(use).shape == (1, 4)
    assert not counters["frames"]
    # Also where what makes the visit is compiled itself, of which only the visit is left out.
    with torch.no_grad():
        assert torch.compile(lambda x: state.visit(use) + x, backend="eager")(torch.ones(1)).shape == (1, 4)
    assert counters["graph_break"]
    counters.clear()
    other(torch.ones(1, 2))
    assert counters["frames"]["total"] == 1


def test_what_a_step_remembers_is_forgotten_at_its_end(cut: Apply) -> None:
    state = cut(nn.Linear(2, 2))
    value = torch.ones(2)
    with state.activity:
        with state.activity:
            state.group.keep_copy(value, value)
        assert state.group.shared_copy(value) is value
    assert state.group.shared_copy(value) is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_handed_over_as_they_arrive(cut: Apply, set_to_none: bool) -> None:
    layer = nn.Linear(3, 4)
    state = cut(layer, {"weight": Layout(0, (4,)), "bias": Layout(0, (4,))})
    inputs = torch.randn(5, 3)
    for _ in range(2):
        for count in (1, 2):
            with state.activity:
                state.read(layer, "weight").mul(inputs.sum(0)).sum().backward()
                assert state.read(layer, "weight").grad is None
            assert isinstance(layer.weight.grad, DTensor)
            assert layer.weight.grad.placements == layer.weight.placements
            torch.testing.assert_close(local(layer.weight.grad), count * inputs.sum(0).expand(2, 3))
        layer.zero_grad(set_to_none=set_to_none)


def test_ties_are_one_parameter_with_one_leaf(cut: Apply) -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    net["head"].weight = net["embedding"].weight
    state = cut(net, {"embedding.weight": Layout(0, (4,))})
    assert net["head"].weight is net["embedding"].weight
    with state.activity:
        assert net["head"].weight is net["embedding"].weight
        (2 * state.read(net["head"], "weight") + 3 * state.read(net["embedding"], "weight")).sum().backward()
    assert local(net["head"].weight.grad).tolist() == [[5.0, 5.0]] * 2


def test_a_leaf_trains_as_its_parameter_does_when_it_is_read(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    state = cut(layer, {"weight": Layout(0, (2,))})
    for trains in (False, True, False, True):
        layer.weight.requires_grad_(trains)
        with state.activity:
            assert layer.weight.requires_grad is trains
            (state.read(layer, "weight").sum() + state.read(layer, "bias").sum()).backward()
    assert local(layer.weight.grad).tolist() == [[2.0, 2.0]]


def test_parameters_can_be_replaced_and_taken_away(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    state = cut(layer, {"weight": Layout(0, (2,))})
    mine = nn.Parameter(torch.ones(2, 2))
    layer.weight = mine
    with state.activity:
        assert layer.weight is mine
        assert state.read(layer, "weight") is mine
    del layer.weight
    assert not hasattr(layer, "weight")
    layer.weight = torch.zeros(1)
    assert layer.weight.tolist() == [0.0]
    del layer.weight
    with pytest.raises(AttributeError):
        del layer.weight
    layer.register_parameter("weight", mine)
    assert layer.weight is mine
    with pytest.raises(TypeError, match="cannot assign"):
        layer.weight = torch.zeros(1)
    layer.register_buffer("bias_", torch.zeros(1))
    layer.bias = None
    with state.activity:
        assert layer.bias is None


def test_a_parameter_that_was_none_can_come_later(cut: Apply) -> None:
    layer = nn.Linear(2, 2, bias=False)
    state = cut(layer)
    assert layer.bias is None
    layer.bias = mine = nn.Parameter(torch.ones(2))
    with state.activity:
        assert layer.bias is mine


def test_another_dtype_is_another_leaf(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    state = cut(layer, {"weight": Layout(0, (2,))})
    with state.activity:
        assert layer.weight.dtype == torch.float32
    layer.double()
    with state.activity:
        assert layer.weight.dtype == torch.float64
        state.read(layer, "weight").sum().backward()
    assert local(layer.weight.grad).dtype == torch.float64


def test_lists_and_dicts_of_parameters(cut: Apply) -> None:
    net = nn.ModuleDict(
        {
            "list": nn.ParameterList([torch.zeros(4), torch.ones(4)]),
            "dict": nn.ParameterDict({"a": torch.full((4,), 2.0)}),
        }
    )
    state = cut(net, {"list.1": Layout(0, (4,))})
    with state.activity:
        assert [type(value) for value in net["list"]] == [Tensor, executor.Shard]
        assert net["dict"]["a"].tolist() == [2.0] * 4
        assert [value.sum().item() for value in net["dict"].values()] == [8.0]


def test_attributes_that_hold_parameters_follow_them(cut: Apply) -> None:
    net = nn.Linear(2, 2)
    net.held = [net.weight, {"bias": net.bias}, 3]
    object.__setattr__(net, "alias", net.weight)
    state = cut(net, {"weight": Layout(0, (2,))})
    assert net.held[0] is net.alias is net.weight
    with state.activity:
        assert net.alias is net.weight
        assert net.held == [net.weight, {"bias": net.bias}, 3]
    other = copy.deepcopy(net)
    assert other.alias is other.weight is not net.weight
    net.held = [net.bias]
    assert net.held[0] is net.bias


def test_an_lstm_runs_on_replicated_weights(cut: Apply) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, batch_first=True)
    inputs = torch.randn(2, 5, 3)
    layer(inputs)[0].sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    state = cut(layer)
    with state.activity:
        layer(inputs)[0].sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(local(parameter.grad), expected[name])


def test_parametrizations_of_before(cut: Apply) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(3, 4), torch.randn(2, 3)
    plain = layer(inputs)
    nn.utils.parametrizations.weight_norm(layer)
    state = cut(layer)
    with state.activity:
        output = layer(inputs)
        torch.testing.assert_close(output, plain)
        output.sum().backward()
    names = ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"]
    assert [name for name, parameter in layer.named_parameters() if parameter.grad is not None] == names


def test_parametrizations_that_come_late_are_loud(cut: Apply) -> None:
    layer = nn.Linear(3, 4)
    state = cut(layer)
    nn.utils.parametrizations.weight_norm(layer)
    with state.activity, pytest.raises(RuntimeError, match="mixed"):
        layer(torch.randn(2, 3))


def test_a_property_of_the_users_class_goes_first(cut: Apply) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parameters["weight"] = nn.Parameter(torch.ones(2))

        @property
        def weight(self) -> str:
            return "mine"

    module = Scaled()
    state = cut(module)
    with state.activity:
        assert module.weight == "mine"


def test_modules_of_one_class_keep_one_class(cut: Apply) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.ReLU())
    cut(net)
    assert type(net[0]) is type(net[1]) is not nn.Linear
    assert isinstance(net[0], nn.Linear)
    assert (type(net[0]).__qualname__, type(net[2])) == ("Linear", nn.ReLU)


def test_a_copy_has_leaves_of_its_own(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    state = cut(layer, {"weight": Layout(0, (2,))})
    with state.activity:
        _ = layer.weight
        other = copy.deepcopy(layer)
        state.read(other, "weight").sum().backward()
        assert other.weight.shape == (2, 2)
    assert layer.weight.grad is None
    assert local(other.weight.grad).tolist() == [[1.0, 1.0]]


def test_a_module_is_freed_with_its_leaves(cut: Apply) -> None:
    layer = nn.Linear(2, 2)
    state = cut(layer)
    with state.activity:
        layer.weight.sum().backward()
    gone = weakref.ref(state.read(layer, "weight"))
    del layer, state
    gc.collect()
    assert gone() is None


def test_hooks_on_gradients_are_carried_over(cut: Apply) -> None:
    layer = nn.Linear(2, 4)
    seen: list[torch.Size] = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    layer.weight.register_hook(lambda gradient: gradient * 2)
    layer.weight.register_hook(lambda gradient: torch.arange(8.0).view(4, 2))
    layer.bias.register_hook(lambda gradient: gradient * 3)
    state = cut(layer, {"weight": Layout(0, (4,))}, partial=("bias",))
    with state.activity:
        assert not isinstance(layer.bias, PartialTensor)
        (state.read(layer, "weight").sum() + layer.bias.sum()).backward()
    assert seen == [(4, 2)]
    assert local(layer.weight.grad).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert local(layer.bias.grad).tolist() == [3.0] * 4


def test_hooks_that_come_late(cut: Apply) -> None:
    layer = nn.Linear(2, 4)
    state = cut(layer, {"weight": Layout(0, (4,))}, partial=("bias",))
    for name in ("weight", "bias"):
        layer.get_parameter(name).register_hook(lambda gradient: gradient * 2)
    with state.activity:
        state.read(layer, "weight").sum().backward()
        with pytest.raises(ModuleError, match=r"shape \(4,\)"):
            layer.bias.sum().backward()
    assert local(layer.weight.grad).tolist() == [[2.0, 2.0]] * 2


def test_hooks_that_wait_for_accumulated_gradients(cut: Apply) -> None:
    early, late = nn.Linear(2, 2), nn.Linear(2, 2)
    early.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModuleError, match="'weight' has a hook"):
        cut(early)
    state = cut(late)
    seen: list[nn.Parameter] = []
    late.weight.register_post_accumulate_grad_hook(seen.append)
    with state.activity:
        late.weight.sum().backward()
    assert seen == [late.weight]


def test_partial_gradients_wait_for_one_sum(cut: Apply) -> None:
    norm = nn.LayerNorm(2)
    state = cut(norm, partial=("weight",))
    with state.activity:
        assert isinstance(norm.weight, PartialTensor)
        assert type(norm.bias) is Tensor
        assert type(state.read(norm, "weight")) is Tensor
        F.layer_norm(torch.randn(3, 2), (2,), norm.weight, norm.bias).sum().backward()
        norm.weight.sum().backward()
    gradient = local(norm.weight.grad).clone()
    # The ranks of the fake group are alone, so their sum is what they have.
    state.complete_partial_gradients()
    assert torch.equal(local(norm.weight.grad), gradient)
    with state.activity:
        norm.weight.sum().backward()
    torch.testing.assert_close(local(norm.weight.grad), gradient / 2 + 0.5)
    norm.zero_grad()
    with state.activity:
        norm.weight.sum().backward()
    assert local(norm.weight.grad).tolist() == [0.5, 0.5]
