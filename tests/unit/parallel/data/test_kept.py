"""What is in place of a parameter while units stay gathered: the shard, but for a running forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.mesh.device import build_device_mesh, data_mesh
from lightning_3d.parallel.data.apply import apply_data
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.plan import plan_data
from lightning_3d.shards.resting import let_rest
from tests.spmd.packed import mesh_of
from tests.unit.worlds import fake_world

FIRST, BLOCK, OTHER = "first.weight", "blocks.0.weight", "blocks.1.weight"


class Stacked(nn.Module):
    """Notes what a step sees of its parameters when it begins and when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.began: set[str] = set()
        self.ended: set[str] = set()

    def step(self) -> Tensor:
        self.began = cut(self)
        x = self.first(torch.ones(2, 4))
        for block in self.blocks:
            x = block(x)
        self.ended = cut(self)
        total: Tensor = x.sum()
        return total


def cut(module: nn.Module) -> set[str]:
    """The weights that are shards now."""
    found = {name for name, value in module.named_parameters() if isinstance(value, DTensor)}
    return {name for name in found if name.endswith("weight")}


def gathered(module: Stacked) -> set[str]:
    """The parts of the module whose gathered copies are in memory."""
    parts = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    return {name for name, part in parts.items() if part._get_fsdp_state()._fsdp_param_groups[0].is_unsharded}


@contextmanager
def applied(zero: int, **options: Any) -> Iterator[tuple[Stacked, DataEngine]]:
    spec = mesh_of(2, 1)
    with fake_world(2, 0):
        module = Stacked()
        plan = plan_data(parameter_table(module), find_stacks(module), zero_stage=zero, data_size=2, **options)
        engine = apply_data(module, plan, data_mesh(build_device_mesh(spec, "cpu")))
        let_rest(module, {}, "tensor_parallel")
        engine.before_microbatch(last=False)
        yield module, engine


def accumulate(module: Stacked, engine: DataEngine, between: Callable[[], object] = lambda: None) -> None:
    loss = engine.run(module.step)
    between()
    with engine.backward():
        loss.backward()


WEIGHTS = {FIRST, "blocks.0.weight", "blocks.1.weight", "blocks.2.weight"}
BLOCKS = {"blocks.0", "blocks.1", "blocks.2"}


@pytest.mark.parametrize(("zero", "kept"), [(1, {"", *BLOCKS}), (2, {"", *BLOCKS}), (3, {""})])
def test_shards_are_in_place_outside_of_passes(zero: int, kept: set[str]) -> None:
    with applied(zero) as (module, engine):
        assert cut(module) == WEIGHTS
        loss = engine.run(module.step)
        assert FIRST not in module.began | module.ended
        assert (cut(module), gathered(module)) == (WEIGHTS, kept)
        with engine.backward():
            assert FIRST not in cut(module)
            assert (BLOCK in cut(module)) is (zero == 3)
            loss.backward()
        assert (cut(module), gathered(module)) == (WEIGHTS, kept)
        engine.rest()
        assert (cut(module), gathered(module)) == (WEIGHTS, set())


@pytest.mark.parametrize("unit_blocks", [1, 2])
def test_a_step_sees_kept_blocks_once_it_has_called_them(unit_blocks: int) -> None:
    with applied(1, unit_blocks=unit_blocks) as (module, engine):
        for _ in range(2):
            accumulate(module, engine)
            assert module.began == WEIGHTS - {FIRST}
            assert module.ended == set()


# Each writes to the weight of the first block.
WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.clamp_(-1, 1),
    "data = whole": lambda weight: setattr(weight, "data", torch.ones(4, 4)),
    "detached": lambda weight: weight.detach().add_(1),
    "a row": lambda weight: weight.__setitem__(0, 0.0),
    "lists": lambda weight: torch._foreach_mul_([weight], 2.0),
    "lists of data": lambda weight: torch._foreach_mul_([weight.data.detach()], 2.0),
    "a window": lambda weight: weight[:, 0].mul_(2),
    "a window of data": lambda weight: weight.data.t()[1:].mul_(2),
    "init": lambda weight: nn.init.normal_(weight),
    "out": lambda weight: torch.mul(weight, 2, out=weight),
    "the local part": lambda weight: weight.data.to_local().mul_(2),
    "an optimizer": lambda weight: optimizer_step(weight),
}
# What writes to nothing of it.
READS: dict[str, Callable[[Any], object]] = {
    "computed": lambda weight: (weight * 2).add_(1),
    "a copy": lambda weight: weight.clone().mul_(2),
    "lists of results": lambda weight: torch._foreach_mul_(torch._foreach_mul([weight], 2.0), 2.0),
    "a norm": lambda weight: weight.sum(),
    "a gradient": lambda weight: weight.grad,
}


def optimizer_step(weight: Any) -> None:
    weight.grad = torch.ones(4, 4)
    torch.optim.SGD([weight], lr=0.1, foreach=True).step()


@pytest.mark.parametrize("form", WRITES)
def test_what_was_written_is_gathered_anew(form: str) -> None:
    with applied(1) as (module, engine):
        accumulate(module, engine)
        block: Any = module.blocks[0]
        parameter = block._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]
        waiting = parameter._unsharded_param.grad
        with torch.no_grad():
            WRITES[form](module.get_parameter(BLOCK))
        left: list[set[str]] = []
        module.first.register_forward_hook(lambda *_: left.append(gathered(module)))
        engine.run(module.step)
        assert left == [{"", *BLOCKS} - {"blocks.0"}]
        assert waiting is not None
        assert waiting is parameter._unsharded_param.grad


@pytest.mark.parametrize("form", READS)
def test_what_was_read_stays_gathered(form: str) -> None:
    with applied(1) as (module, engine):
        accumulate(module, engine)
        with torch.no_grad():
            READS[form](module.get_parameter(BLOCK))
        left: list[set[str]] = []
        module.first.register_forward_hook(lambda *_: left.append(gathered(module)))
        engine.run(module.step)
        assert left == [{"", *BLOCKS}]


@pytest.mark.parametrize("written", [True, False])
def test_a_backward_gathers_what_was_written_since_its_forward(written: bool) -> None:
    with applied(1) as (module, engine):
        group: Any = module.blocks[0]
        group = group._get_fsdp_state()._fsdp_param_groups[0]
        left: list[bool] = []
        reshard = group.reshard

        def note() -> None:
            reshard()
            left.append(group.is_sharded)

        def between() -> None:
            group.reshard = note
            if written:
                module.get_parameter(BLOCK).data.clamp_(-1, 1)

        accumulate(module, engine, between)
        assert left == [True] * written
        assert gathered(module) == {"", *BLOCKS}
