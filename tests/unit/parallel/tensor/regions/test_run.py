from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.apply import apply_tensor
from lightning_3d.parallel.tensor.hints import hinted_regions
from lightning_3d.parallel.tensor.overrides import Overrides
from lightning_3d.parallel.tensor.regions.plan import Region, plan_regions, region_candidates
from lightning_3d.parallel.tensor.regions.run import run_regions
from lightning_3d.parallel.tensor.regions.trial import CallSample
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ProcessShardGroup
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.threads import ThreadShardGroup, run_threads
from tests.unit.parallel.tensor.experts import HIDDEN, Around, Mixture, mixtral, qwen, routed


class Counted(ThreadShardGroup):
    sums = 0

    def sum(self, value: Tensor) -> Tensor:
        self.sums += 1
        return super().sum(value)


def regions_of(model: nn.Module, observed: str, sample: CallSample, degree: int) -> tuple[Region, ...]:
    candidates = region_candidates(model, Overrides(), hinted_regions(model), [observed])
    found = plan_regions(model, parameter_table(model), candidates, {observed: sample}, degree)
    assert found.regions
    return found.regions


def cut(model: nn.Module, layouts: dict[str, Layout], group: Any, partial: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Has a model show local weights, and returns their leaves."""
    leaves = {}
    for name, value in list(model.named_parameters()):
        owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        layout = layouts.get(name)
        whole = value.detach()
        local = whole if layout is None else layout.part(whole, group.rank, group.size)
        leaves[name] = leaf = local.clone().requires_grad_()
        shown: Any = leaf
        if layout is not None:
            shown = Shard(leaf, layout.dim, layout.segments, group)
        elif name in partial:
            shown = PartialTensor(leaf, group)
        owner._parameters[key] = shown
    return leaves


def compare(
    model: nn.Module, regions: tuple[Region, ...], loss_of: Any, degree: int, tolerance: float, **options: Any
) -> list[int]:
    """Compares loss and every gradient on ranks with the whole model's; returns the sums of each rank's step."""
    whole = copy.deepcopy(model)
    expected = loss_of(whole)
    expected.backward()
    layouts = {name: layout for region in regions for name, layout in region.layouts.items()}

    def rank(group: ThreadShardGroup) -> int:
        group.__class__ = Counted
        mine = copy.deepcopy(model)
        leaves = cut(mine, layouts, group, **options)
        run_regions(mine, regions, group)
        loss = loss_of(mine)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        for name, value in whole.named_parameters():
            assert value.grad is not None
            found = leaves[name].grad
            assert found is not None
            if name in options.get("partial", ()):
                found = group.sum(found)
            layout = layouts.get(name)
            part = value.grad if layout is None else layout.part(value.grad, group.rank, group.size)
            torch.testing.assert_close(found, part, rtol=tolerance, atol=tolerance, msg=name)
        return group.sums if isinstance(group, Counted) else 0

    return run_threads(degree, rank)


def tokens(count: int = 9) -> Tensor:
    return torch.randn(2, count, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


_TOKENS = CallSample(args=(torch.empty(2, 9, HIDDEN),))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"balance": True}])
def test_loss_and_gradients_are_those_of_the_whole(options: dict[str, bool], degree: int) -> None:
    model = Around(Mixture(**options)).double()
    regions = regions_of(model, "mixture", _TOKENS, degree)
    compare(model, regions, lambda each: each(tokens()), degree, 1e-12)


@pytest.mark.parametrize("build", [mixtral, qwen])
def test_hugging_face(build: Any) -> None:
    torch.manual_seed(0)
    model = build(experts_implementation="eager").double()
    regions = regions_of(model, "model.layers.0.mlp.experts", routed(), 2)
    ids = torch.arange(12).view(2, 6)
    # Routing weights pass through fp32.
    sums = compare(model, regions, lambda each: each(ids, labels=ids).loss, 2, 1e-6)
    # Of each layer: the output; the gradients of tokens and of routing weights.
    assert sums == [6, 6]


def test_grouped_products() -> None:
    torch.manual_seed(0)
    model = mixtral()
    regions = regions_of(model, "model.layers.0.mlp.experts", routed(), 2)
    ids = torch.arange(12).view(2, 6)
    compare(model, regions, lambda each: each(ids, labels=ids).loss, 2, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    model = Around(Mixture()).double()
    regions = regions_of(model, "mixture", _TOKENS, 2)
    compare(model, regions, lambda each: checkpoint(each, tokens().requires_grad_(), use_reentrant=reentrant), 2, 1e-12)


def test_gradients_of_replicated_weights_may_be_summed_later() -> None:
    model = Around(Mixture()).double()
    regions = regions_of(model, "mixture", _TOKENS, 2)
    at_once = compare(model, regions, lambda each: each(tokens()), 2, 1e-12)
    later = compare(model, regions, lambda each: each(tokens()), 2, 1e-12, partial=("mixture.router.weight",))
    # The one that is left is made by the comparison.
    assert later == at_once


def test_without_gradients_there_is_one_sum() -> None:
    model = Around(Mixture()).double().eval()
    (region,) = regions_of(model, "mixture", _TOKENS, 2)
    expected = model(tokens())

    def rank(group: ThreadShardGroup) -> int:
        mine = copy.deepcopy(model)
        cut(mine, dict(region.layouts), group)
        run_regions(mine, [region], group)
        group.__class__ = Counted
        with torch.no_grad():
            torch.testing.assert_close(mine(tokens()), expected.detach(), rtol=1e-12, atol=1e-12)
        assert isinstance(group, Counted)
        return group.sums

    assert run_threads(2, rank) == [1, 1]


def test_inputs_that_are_cut_are_gathered() -> None:
    model = Around(Mixture()).double()
    (region,) = regions_of(model, "mixture", _TOKENS, 2)
    x = tokens(8).requires_grad_()
    expected = model.mixture(x)[0]
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    layout = Layout(1, (8,))

    def rank(group: ThreadShardGroup) -> None:
        mine = copy.deepcopy(model)
        cut(mine, dict(region.layouts), group)
        run_regions(mine, [region], group)
        own = layout.part(x.detach(), group.rank, 2).clone().requires_grad_()
        out = mine.mixture(Shard(own, 1, (8,), group))[0]
        assert type(out) is Tensor
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        torch.testing.assert_close(own.grad, layout.part(gradient, group.rank, 2), rtol=1e-12, atol=1e-12)

    run_threads(2, rank)


def test_weights_are_shown_again_after_a_call_and_after_a_failure() -> None:
    model = Around(Mixture()).double()
    (region,) = regions_of(model, "mixture", _TOKENS, 2)

    def rank(group: ThreadShardGroup) -> None:
        mine = copy.deepcopy(model)
        cut(mine, dict(region.layouts), group)
        run_regions(mine, [region], group)
        before = dict(mine.named_parameters())
        mine(tokens())
        with pytest.raises(RuntimeError, match="shape"):
            mine.mixture(torch.ones(3, HIDDEN + 1, dtype=torch.float64))
        after = dict(mine.named_parameters())
        assert before.keys() == after.keys()
        assert all(after[name] is value for name, value in before.items())

    run_threads(2, rank)


class Changing(Mixture):
    more = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = super().forward(x)
        return (*found, found[0]) if self.more else found


def test_another_number_of_outputs_is_refused() -> None:
    model = nn.ModuleDict({"mixture": Changing()}).double()
    (region,) = regions_of(model, "mixture", _TOKENS, 2)

    def rank(group: ThreadShardGroup) -> None:
        mine = copy.deepcopy(model)
        cut(mine, dict(region.layouts), group)
        run_regions(mine, [region], group)
        mine["mixture"].more = True
        with pytest.raises(ModuleError, match="mixture returned 3 values, and 2 when it was planned"):
            mine["mixture"](tokens())

    run_threads(2, rank)


def test_on_parameters_of_the_tensor_axis_and_on_a_copy(tensor_mesh: DeviceMesh) -> None:
    model = Around(Mixture()).double()
    (region,) = regions_of(model, "mixture", _TOKENS, 2)
    group = ProcessShardGroup(tensor_mesh.get_group())
    state = apply_tensor(model, dict(region.layouts), tensor_mesh, group, device=torch.device("cpu"))
    run_regions(model, [region], group)
    seen = []
    model.mixture.experts[0].w1.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight))
    for each in (model, copy.deepcopy(model)):
        with state.activity:
            each(tokens()).backward()
        inner: Any = each.mixture.experts[0].w1.weight
        assert isinstance(inner, DTensor)
        assert isinstance(inner.grad, DTensor)
        assert inner.grad.to_local().shape == (24, HIDDEN)
        assert inner.grad.to_local().any()
        router: Any = each.mixture.router.weight
        assert isinstance(router.grad, DTensor)
        # Computed with the leaf on the parameter's memory, no shard.
        assert type(seen[-1]) is Tensor
        assert seen[-1].data_ptr() == inner.to_local().data_ptr()
    assert len(seen) == 2
