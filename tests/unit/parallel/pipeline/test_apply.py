from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.parallel.pipeline.apply import apply_pipeline
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from tests.unit.worlds import fake_world


class Net(nn.Module):
    """A tied head, recurrent blocks that keep their weights in a list, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.blocks = nn.ModuleList(nn.GRU(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embed.weight
        self.blocks[1].weight_ih_l0.no_decay = True
        self.register_buffer("table", torch.ones(2))


GRU = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def planned(net: Net, ranks: tuple[int, int]) -> PipelinePlan:
    holders: dict[str, tuple[int, ...]] = {"embed.weight": (0, 1), "scale": (0,), "head.bias": (1,)}
    holders |= {f"blocks.{block}.{name}": (block,) for block in range(2) for name in GRU}
    assert set(holders) == {name for name, _ in net.named_parameters()}
    return PipelinePlan(
        schedule="1f1b",
        ranks=len(set(ranks)),
        blocks=("blocks.0", "blocks.1"),
        stages=tuple(Stage(index=index, rank=rank, first=index, end=index + 1) for index, rank in enumerate(ranks)),
        holders=holders,
        modules={"embed": (0,), "blocks.0": (0,), "blocks.1": (1,), "head": (1,)},
        boundaries=((), ()),
    )


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def test_parameters_of_others_are_freed_and_stay_what_they_are() -> None:
    net = Net()
    gone = weakref.ref(net.blocks[1].weight_hh_l0.untyped_storage())
    applied = apply_pipeline(net, planned(net, (0, 1)), 0, torch.device("cpu"))
    gc.collect()
    assert gone() is None
    absent = {name for name, parameter in net.named_parameters() if parameter.is_meta}
    assert absent == {"head.bias", *(f"blocks.1.{name}" for name in GRU)}
    weight = net.blocks[1].weight_ih_l0
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.requires_grad, weight.no_decay) == ((12, 4), True, True)
    assert net.blocks[1]._flat_weights[0] is weight
    assert net.head.weight is net.embed.weight
    assert not net.table.is_meta
    (stage,) = applied.stages.values()
    assert names(stage) == {"parts.0.weight", *(f"parts.1.{name}" for name in GRU), "holders.0.scale"}


def test_ties_of_absent_parameters_are_kept() -> None:
    net = Net()
    plan = planned(net, (0, 1))
    holders = {**plan.holders, "embed.weight": (1,), "scale": (1,)}
    other = PipelinePlan(
        schedule=plan.schedule,
        ranks=2,
        blocks=plan.blocks,
        stages=plan.stages,
        holders=holders,
        modules={"blocks.0": (0,), "blocks.1": (1,), "head": (1,)},
        boundaries=plan.boundaries,
    )
    apply_pipeline(net, other, 0, torch.device("cpu"))
    assert net.embed.weight.is_meta
    assert net.head.weight is net.embed.weight
    assert not net.scale.requires_grad


def test_what_is_on_the_meta_device_is_applied_too() -> None:
    with torch.device("meta"):
        net = Net()
    kept = net.blocks[0].weight_hh_l0
    applied = apply_pipeline(net, planned(net, (0, 1)), 1, torch.device("cpu"))
    assert net.blocks[0].weight_hh_l0 is not kept, "absent ones are objects of their own"
    # The head has the tied weight itself, so no holder is needed for the embedding's name.
    assert names(applied.stages[1]) == {*(f"parts.0.{name}" for name in GRU), "parts.1.weight", "parts.1.bias"}


@pytest.mark.parametrize("reshard", [True, False])
def test_stages_of_one_rank_share_parameters_and_the_lower_one_manages_them(reshard: bool) -> None:
    net = Net()
    applied = apply_pipeline(net, planned(net, (0, 0)), 0, torch.device("cpu"))
    assert not any(parameter.is_meta for parameter in net.parameters())
    assert applied.ignored[0] == frozenset()
    assert applied.ignored[1] == {net.embed.weight}
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(applied.stages[0], mesh=mesh, reshard_after_forward=reshard)
        # The parameter is another object now, under both names.
        assert net.head.weight is net.embed.weight
        assert isinstance(net.scale, DTensor), "it was replaced through the holder"
        assert applied.ignored[1] == {net.embed.weight}
        ignored = set(applied.ignored[1])
        fully_shard(applied.stages[1], mesh=mesh, ignored_params=ignored)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert net.head.weight is net.embed.weight
