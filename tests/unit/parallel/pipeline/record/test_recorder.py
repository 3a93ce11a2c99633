"""The recorder on a step with values, as it serves a module that is already cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.graph.calls import Call, around_calls
from lightning_3d.parallel.pipeline.record.hidden import counted
from lightning_3d.parallel.pipeline.record.recorder import Recorder
from lightning_3d.parallel.pipeline.record.step import (
    ArgumentLeaf,
    CallRecord,
    ConstantLeaf,
    HiddenLeaf,
    Origin,
    StepRecord,
)
from lightning_3d.shards.group import ShardOptions
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.tensor import ShardTensor
from tests.unit.parallel.pipeline.planned import Deep, Lambdas, Relative, states


class Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.function(function, args, kwargs or {}, lambda made, a, k: made(*a, **k))


def record(
    model: nn.Module, *, hooked: frozenset[str] = frozenset(), step: Callable[[], Any] | None = None
) -> StepRecord:
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = frozenset(name for name, _ in model.named_modules() if name.count(".") == 1 and "blocks." in name)
    tracked = frozenset(
        name for name, child in model.named_children() if any(True for _ in child.parameters()) and name != "blocks"
    )
    recorder = Recorder(
        blocks=blocks,
        tracked=tracked,
        parameters={
            name: tuple(names[parameter] for parameter in model.get_submodule(name).parameters())
            for name in (*blocks, *tracked)
        },
        parameter_name=lambda value: names.get(value) if isinstance(value, nn.Parameter) else None,
    )

    def handle(name: str, call: Call) -> Any:
        return recorder.call(name, call.args, call.kwargs, lambda args, kwargs: call.function(*args, **kwargs))

    for name in blocks | tracked:
        around_calls(model.get_submodule(name), partial(handle, name))

    def returned(name: str, module: nn.Module, args: Any, output: Any) -> None:
        recorder.returned_inside(name, output)

    for name in hooked:
        model.get_submodule(name).register_forward_hook(partial(returned, name))
    with Functions(recorder):
        output = model(states()) if step is None else step()
    return recorder.finish(output)


def test_positions_and_boundaries() -> None:
    found = record(Lambdas())
    assert [(call.module, call.position) for call in found.calls] == [
        ("enter", 0),
        *((f"blocks.{index}", index) for index in range(4)),
        ("leave", 4),
    ]
    assert found.parameters["enter.weight"] == {0}
    assert found.parameters["blocks.0.linear.bias"] == {1}
    assert found.parameters["lambdas.3"] == {3}
    assert found.modules["leave"] == {4}
    assert [[str(value.origin) for value in boundary] for boundary in found.boundaries[2:]] == [
        ["output 0 of rms_norm", "output 0 of add"],
        # Only the mix is needed from the last block on.
        ["output 0 of add"],
    ]


def test_numbers_of_functions_do_not_depend_on_the_batch() -> None:
    def masks(model: Deep, index: int, x: Tensor) -> Tensor:
        mask = torch.ones(3, 3).tril() if index % 2 else None
        return x + 1 if mask is None else x + (x.size(0) * mask.sum() / 6)

    def plain(model: Deep, index: int, x: Tensor) -> Tensor:
        return x + 1

    def origins(between: Callable[[Deep, int, Tensor], Tensor]) -> list[Origin]:
        return [value.origin for boundary in record(Deep(between)).boundaries for value in boundary]

    assert origins(masks) == origins(plain)


def test_a_module_that_blocks_call_is_used_there() -> None:
    found = record(Relative())
    assert found.modules["positions"] == {1, 2, 3, 4}
    assert found.parameters["positions.weight"] == {1, 2, 3, 4}
    assert [call.module for call in found.calls] == [f"blocks.{index}" for index in range(4)]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: dict[str, int]) -> tuple[Any, ...]:
        y = self.last(self.first(x))
        return y, cache, x, y, "text"


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, *_ = block(x, cache={})
        return x


def test_structures_of_outputs() -> None:
    found = record(Passing(), hooked=frozenset({"blocks.1.first", "blocks.1.last"}))
    plain = HiddenLeaf((2, 3, 8), torch.float32, requires_grad=True)
    again = HiddenLeaf((2, 3, 8), torch.float32, requires_grad=True, same_as=0)
    first, second = found.calls
    assert first.output.leaves == (plain, ArgumentLeaf(0), again, ConstantLeaf("text"))
    assert first.inside == ()
    assert [(name, number, output.leaves) for name, number, output in second.inside] == [
        ("blocks.1.first", 0, (plain,)),
        ("blocks.1.last", 0, (again,)),
    ]
    assert isinstance(first, CallRecord)


def test_what_a_hook_collects_crosses() -> None:
    model = Passing()
    collected: list[Tensor] = []
    model.blocks[0].first.register_forward_hook(lambda module, args, output: collected.append(output))

    def step() -> Tensor:
        return model(states()).mean() + collected[0].mean()

    (_, boundary) = record(model, hooked=frozenset({"blocks.0.first"}), step=step).boundaries
    assert [value.origin for value in boundary] == [
        Origin(kind="hook", maker="blocks.0.first"),
        Origin(kind="module", maker="blocks.0"),
    ]


def test_what_is_written_to_has_a_new_origin() -> None:
    def add(model: Deep, index: int, x: Tensor) -> Tensor:
        x += 1
        return x

    found = record(Deep(add))
    assert [[value.origin.maker for value in boundary] for boundary in found.boundaries] == [["add_"]] * 4


def test_a_part_of_a_sequence_keeps_its_layout() -> None:
    class Group:
        size, rank, options = 2, 0, ShardOptions()

    def cut(model: Deep, index: int, x: Tensor) -> Tensor:
        shard = ShardTensor(x, 1, (6,), Group())  # type: ignore[arg-type]
        return made.setdefault(index, shard)  # type: ignore[return-value]

    made: dict[int, ShardTensor] = {}
    recorder = Recorder(blocks=frozenset({"a", "b"}), tracked=frozenset(), parameter_name=lambda value: None)
    shard = cut(Deep(), 0, states())
    recorder.call("a", (states(),), {}, lambda args, kwargs: shard)
    recorder.call("b", (shard,), {}, lambda args, kwargs: states())
    (value,) = recorder.finish(None).boundaries[1]
    assert value.shape == (2, 6, 8)
    assert value.layout == Layout(1, (6,))
    assert value.nbytes == 2 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("function", "is_counted"),
    [
        (torch.relu, True),
        (Tensor.size, False),
        (Tensor.dim, False),
        (Tensor.T.__get__, True),  # type: ignore[attr-defined]
        (Tensor.shape.__get__, False),  # type: ignore[attr-defined]
        (Tensor.requires_grad_, False),
        (Tensor.item, True),
    ],
)
def test_which_functions_are_counted(function: Any, is_counted: bool) -> None:
    value = states()
    assert counted(function, (value,), {}, lambda leaf: leaf is value) is is_counted
    assert not counted(function, (value,), {}, lambda leaf: False)
