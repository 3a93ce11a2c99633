"""Programs are compiled in one graph, once for equal blocks, or go on as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_3d.parallel.tensor.replay.block import ReplayOptions
from lightning_3d.parallel.tensor.replay.blocks import Replays
from tests.unit.parallel.tensor.replay.toys import Block, CountingGroup, Twins, inputs, install, read

# Dynamo makes an instance of every autograd function that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


class Compiled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(self.norm(x)) + x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_equal_blocks_are_one_graph_and_exact(backend: str) -> None:
    first, second = Compiled(), Compiled()
    second.group = first.group
    plain = Compiled()
    options = ReplayOptions(compile=True, backend=backend)
    blocks = {"0": first, "1": second}
    replays = Replays(blocks, first.group, read=read, options=options)
    install(replays, blocks)
    for x in inputs(5):
        for module in (first, second, plain):
            module.zero_grad()
        y, expected = second(first(x)), plain(plain(x))
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(y, expected)
        for one, other, both in zip(first.parameters(), second.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(one.grad + other.grad, both.grad, rtol=1e-5, atol=1e-5)
    assert [str(report) for report in replays.reports()] == ["0: replayed", "1: replayed"]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_what_cannot_be_compiled_goes_on_as_it_is() -> None:
    # Counting is a side effect, which a graph cannot have.
    block = Compiled()
    block.group = CountingGroup()
    twins = Twins(block, compile=True, backend="eager")
    for x in inputs(5):
        twins.call(x)
    assert "block: replayed, not compiled: " in str(twins.replay.report())


def test_programs_are_compiled_where_all_else_runs_as_it_is() -> None:
    block = Compiled()
    twins = Twins(block, compile=True, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        for x in inputs(5):
            twins.call(x)
    assert counters["stats"]["unique_graphs"] == 1
