"""Replayed blocks train as blocks that are not, to the bit: under FSDP2, with micro-batches and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.graph.calls import Call, around_calls
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.tensor.replay.blocks import Replays
from tests.spmd.cut_net import MICROBATCHES, CutNet, batches
from tests.spmd.pool import run_spmd
from tests.spmd.test_tensor_apply import applied
from tests.unit.parallel.tensor.replay.toys import install

pytestmark = pytest.mark.spmd


class CountedNet(CutNet):
    """Counts the calls of forward of one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[int] = []
        attention, runs = self.blocks[0].attention, self.runs
        cls = type(attention)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            runs.append(1)
            return cls.forward(self, x)

        attention.__class__ = type("Attention", (cls,), {"forward": forward})


def train(rank: int, sizes: dict[str, int], zero: int, reentrant: bool | None, replayed: bool) -> tuple[Any, ...]:
    spec = MeshSpec(pipeline=1, **sizes)
    net = CountedNet().double()
    state, engine = applied(net, spec, build_device_mesh(spec, "cpu"), zero)
    blocks = {str(index): block for index, block in enumerate(net.blocks)}
    replays = Replays(blocks, state.group, read=state.read)
    if replayed:
        install(replays, blocks)
    if reentrant is not None:
        for block in net.blocks:
            around_calls(block, lambda call: checkpointed(call, reentrant))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for microbatches in batches(spec.data):
        for index, parts in enumerate(microbatches):
            engine.before_microbatch(last=index == MICROBATCHES - 1)
            with state.activity:
                loss = engine.run(net.loss, parts[spec.coordinate(rank).data])
                loss.backward()
            losses.append(loss.detach())
        engine.gradients_complete()
        state.complete_partial_gradients()
        optimizer.step()
        optimizer.zero_grad()
    engine.rest()
    parameters = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in net.parameters()]
    return [*losses, *parameters], len(net.runs), [str(report) for report in replays.reports()]


def checkpointed(call: Call, reentrant: bool) -> Any:
    return checkpoint(call.function, *call.args, use_reentrant=reentrant, **call.kwargs)


def compare(rank: int, world: int, sizes: dict[str, int], zero: int, reentrant: bool | None) -> None:
    tensors, runs, reports = train(rank, sizes, zero, reentrant, True)
    expected, _, _ = train(rank, sizes, zero, reentrant, False)
    assert all(map(torch.equal, tensors, expected))
    assert reports == ["0: replayed", "1: replayed"]
    # Recorded and checked once; with and without gradients, if both happen. What forward has shown is not checked when
    # it is computed again.
    assert runs == {None: 2, False: 2, True: 4}[reentrant]


@pytest.mark.parametrize(
    ("sizes", "zero", "reentrant"),
    [
        ({"data": 1, "tensor": 2}, 0, None),
        ({"data": 1, "tensor": 2}, 0, False),
        ({"data": 2, "tensor": 2}, 1, None),
        ({"data": 2, "tensor": 2}, 2, True),
        ({"data": 2, "tensor": 2}, 3, False),
    ],
    ids=str,
)
def test_training_is_the_same(sizes: dict[str, int], zero: int, reentrant: bool | None) -> None:
    run_spmd(compare, sizes["data"] * sizes["tensor"], sizes, zero, reentrant)
