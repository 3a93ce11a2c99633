"""Calls of a module's parts while a Trainer runs it: gathered where they need it, with random streams of their own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_3d.graph.blocks import containers, outer_modules
from lightning_3d.graph.calls import Call, Handler, around_calls, plain_calls
from lightning_3d.parallel.tensor.doors import BlockDoor, whole
from lightning_3d.plan.engine import MeshEngine
from lightning_3d.plan.make import Plan
from lightning_3d.random.streams import RandomStreams


def watch_calls(module: nn.Module, plan: Plan, engine: MeshEngine, streams: RandomStreams | None) -> None:
    """Makes calls of the module's parts work anywhere, and blocks and outer modules draw from streams of their own.

    Inside a step the root's parameters are gathered. Outside, in a hook or a callback, the outermost call of any part
    gathers them. Streams carry the name that a part has in the module. Metrics see whole tensors only.

    Args:
        module: A module to which ``plan`` was applied.
        plan: Knows its stacks.
        engine: Gathers what a call needs.
        streams: None leaves randomness to torch's generator.
    """
    around_calls(module, engine.visit)
    for name in containers(module, plan.stacks):
        around_calls(module.get_submodule(name), engine.visit)
    blocks = [block for stack in plan.stacks for block in stack.blocks]
    for name in (*blocks, *outer_modules(module, plan.stacks)):
        part = module.get_submodule(name)
        call: Handler = BlockDoor(part).around if plan.tensor is not None and name in blocks else _made
        around_calls(part, _visiting(engine, call) if streams is None else _drawing(engine, streams, name, call))
    if plan.tensor is not None:
        for child in module.modules():
            if isinstance(child, Metric):
                around_calls(child, _with_whole_arguments)


def unwatch_calls(module: nn.Module) -> None:
    """Undoes `watch_calls`."""
    for child in module.modules():
        plain_calls(child)


def _visiting(engine: MeshEngine, door: Handler) -> Handler:
    return lambda call: engine.visit(lambda: door(call))


def _drawing(engine: MeshEngine, streams: RandomStreams, name: str, door: Handler) -> Handler:
    def handler(call: Call) -> Any:
        with streams.stream(name):
            return engine.visit(lambda: door(call))

    return handler


def _made(call: Call) -> Any:
    return call()


def _with_whole_arguments(call: Call) -> Any:
    args, kwargs = whole((call.args, call.kwargs))
    return call.function(*args, **kwargs)
