from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.graph.calls import around_calls, plain_calls
from lightning_3d.parallel.tensor.doors import BlockDoor, locals_of, shards_again, whole
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.threads import ThreadShardGroup, run_threads
from tests.unit.shards.twins import Twins


class Block(nn.Module):
    """Needs to see whole shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor, *, other: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(x.shape)
        return {"x": x * self.weight, "other": [other["y"], "text"]}


def shard(local: Tensor, group: Twins | None = None) -> Shard:
    return Shard(local, 0, (2 * len(local),), group or Twins())


def test_shards_in_containers_become_locals_and_shards_again() -> None:
    first, second, plain = shard(torch.ones(2)), Shard(torch.zeros(1, 6), 1, (4, 8), Twins()), torch.ones(3)
    tree = ((first, [plain, {"a": second}]), None, "text")
    opened, cuts = locals_of(tree)
    assert opened[0][0] is first._local
    assert opened[0][1][1]["a"] is second._local
    assert opened[0][1][0] is plain
    closed = shards_again(opened, cuts, nn.Identity())
    assert (closed[0][1][1]["a"].cut, closed[0][1][1]["a"].shape) == (second.cut, second.shape)
    assert isinstance(closed[0][0], Shard)
    assert closed[1:] == (None, "text")


def test_without_shards_nothing_is_touched() -> None:
    tree = {"a": torch.ones(2)}
    opened, cuts = locals_of(tree)
    assert opened is tree
    assert cuts is None
    assert shards_again(tree, cuts, nn.Identity()) is tree


def test_a_shard_of_a_shard_is_opened_to_the_plain_tensor() -> None:
    plain = torch.ones(2, 3)
    outer = Shard(Shard(plain, 0, (4,), Twins()), 1, (6,), Twins())
    opened, cuts = locals_of([outer])
    assert opened[0] is plain
    closed = shards_again(opened, cuts, nn.Identity())[0]
    assert (closed.shape, closed._local.shape, closed._local._local) == ((4, 6), (4, 3), plain)


def test_hooks_of_a_block_see_locals_and_forward_sees_shards() -> None:
    block, hooked = Block(), list[Any]()
    block.register_forward_pre_hook(
        lambda module, args, kwargs: hooked.extend([args[0], kwargs["other"]["y"]]), with_kwargs=True
    )
    block.register_forward_hook(lambda module, args, output: hooked.extend([output["x"], output["other"][0]]))
    around_calls(block, BlockDoor(block).around)
    output = block(shard(torch.ones(2)), other={"y": shard(torch.zeros(1))})
    assert [type(value) for value in hooked] == [Tensor] * 4
    assert block.seen == [(4,)]
    assert (output["x"].shape, output["other"][0].shape, output["other"][1]) == ((4,), (2,), "text")
    assert torch.equal(output["x"]._local.detach(), torch.full((2,), 3.0))


def test_plain_calls_are_as_before() -> None:
    block = Block()
    around_calls(block, BlockDoor(block).around)
    assert block(torch.ones(2), other={"y": 1})["other"] == [1, "text"]
    assert block.forward(shard(torch.ones(2)), other={"y": 1})["x"].shape == (4,)
    plain_calls(block)
    assert block(shard(torch.ones(2)), other={"y": 1})["x"].shape == (4,)


def test_a_forward_that_calls_its_block_again() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            assert x.shape == (4,)
            return self.forward(self(x, depth - 1), 0) + 1 if depth else x

    block = Again()
    around_calls(block, BlockDoor(block).around)
    assert block(shard(torch.zeros(2)), 2).shape == (4,)


def test_a_copy_of_a_block_goes_through_the_same_door() -> None:
    block = Block()
    door = BlockDoor(block)
    around_calls(block, lambda call: door.around(call))
    other = copy.deepcopy(block)
    other.weight.data.fill_(5)
    output = other(shard(torch.ones(2)), other={"y": 1})["x"]
    assert (other.seen, block.seen) == ([(4,)], [])
    assert output._local.tolist() == [5.0, 5.0]


def test_structure_changed_by_a_hook_is_refused() -> None:
    block = Block()
    around_calls(block, BlockDoor(block).around)
    block.register_forward_pre_hook(lambda module, args: (*args, 1))
    with pytest.raises(ModuleError, match="a hook of a Block"):
        block(shard(torch.ones(2)), other={"y": 1})


def test_a_call_that_fails_leaves_the_door_closed() -> None:
    block = Block()
    around_calls(block, BlockDoor(block).around)
    with pytest.raises(KeyError):
        block(shard(torch.ones(2)), other={})
    block.seen.clear()
    block(shard(torch.ones(2)), other={"y": 1})
    assert block.seen == [(4,)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_hooks(reentrant: bool) -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, other={"y": 1})["x"]

    def recomputed(run: Any, args: Any, kwargs: Any) -> Any:
        # A reentrant checkpoint knows positional arguments only.
        return checkpoint(lambda *given: run(given, kwargs), *args, use_reentrant=reentrant)

    block = Scaled()
    door = BlockDoor(block)
    around_calls(block, lambda call: door.around(call, through=recomputed))
    inputs = torch.ones(2, requires_grad=True)
    block(shard(inputs))._local.sum().backward()
    assert block.seen == [(4,), (4,)]
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [3.0, 3.0]
    assert block.weight.grad == 4


def test_what_leaves_a_step_is_whole() -> None:
    def leave(group: ThreadShardGroup) -> Any:
        return whole({"logits": Shard(torch.full((1,), float(group.rank)), 0, (2,), group), "loss": 1})

    assert [(result["logits"].tolist(), result["loss"]) for result in run_threads(2, leave)] == [([0.0, 1.0], 1)] * 2


def test_partial_gradients_end_at_doors() -> None:
    block = Block()
    around_calls(block, BlockDoor(block).around)
    inputs = torch.ones(2, requires_grad=True)
    partial = PartialTensor(inputs, Twins())
    opened, cuts = locals_of([partial, 1])
    assert type(opened[0]) is Tensor
    assert cuts is None
    result = block(partial, other={"y": shard(torch.ones(2))})
    assert type(result["x"]) is Tensor
    assert isinstance(result["other"][0], Shard)
    whole(partial + result["x"]).sum().backward()
    # This rank's half of 1 + 3.
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [2.0, 2.0]
