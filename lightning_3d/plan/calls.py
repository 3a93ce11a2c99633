"""Calls of a module's parts while a Trainer runs it: gathered where they need it, with random streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.graph.blocks import containers, outer_modules, parents
from lightning_3d.graph.calls import Call, Handler, around_calls, plain_calls
from lightning_3d.parallel.tensor.doors import BlockDoor
from lightning_3d.parallel.tensor.regions.run import run_regions
from lightning_3d.parallel.tensor.replay.block import ReplayOptions
from lightning_3d.parallel.tensor.replay.blocks import Replays
from lightning_3d.plan.compiling import as_it_is, compile_blocks
from lightning_3d.plan.engine import MeshEngine
from lightning_3d.plan.make import Plan
from lightning_3d.plan.recompute import block_handler, recomputing
from lightning_3d.random.streams import RandomStreams

# Makes a call where parameters can be used.
Visit = Callable[[Callable[[], Any]], Any]


def watch_calls(
    module: nn.Module,
    plan: Plan,
    engine: MeshEngine,
    streams: RandomStreams | None,
    *,
    replay: ReplayOptions | None = None,
    activation_checkpointing: str = "none",
    compile: bool = False,  # noqa: A002 (the public name)
) -> None:
    """Makes calls of the module's parts work anywhere, and blocks and outer modules draw from streams of their own.

    Inside a step the root's parameters are gathered. Outside, in a hook or a callback, the outermost call of any part
    gathers them. Streams carry the name that a part has in the module. On the tensor axis blocks are replayed, and
    local regions run as such.

    Args:
        module: A module to which ``plan`` was applied.
        plan: Knows its stacks.
        engine: Gathers what a call needs.
        streams: None leaves randomness to torch's generator.
        replay: How blocks are replayed; None runs them as they are.
        activation_checkpointing: What blocks compute again in backward: "none", "selective" or "full".
        compile: Blocks are compiled; on the tensor axis their recordings are, which ``replay`` says.
    """
    staged = () if plan.pipeline is None else plan.pipeline.blocks
    for name in ("", *containers(module, plan.stacks), *parents(staged)):
        around_calls(module.get_submodule(name), as_it_is(module.get_submodule(name), engine.visit))
    blocks = list(dict.fromkeys([*staged, *(block for stack in plan.stacks for block in stack.blocks)]))
    doors = _tensor_doors(module, plan, engine, blocks, replay)
    through = recomputing(activation_checkpointing, None if engine.tensor is None else engine.tensor.group)
    parts = dict.fromkeys([*blocks, *plan.drawing, *outer_modules(module, plan.stacks)])
    compiled = () if plan.tensor is not None else compile_blocks(module, blocks, parts, through, wanted=compile)
    for name in parts:
        owned = plan.pipeline is not None and name in plan.pipeline.modules
        visit: Visit = engine.visit_part if owned else engine.visit
        door = block_handler(doors.get(name), through) if name in blocks and name not in compiled else None
        handler: Handler = visit if door is None else _through(visit, door)
        if streams is not None and name in plan.drawing:
            handler = _drawing(handler, streams, name)
        if owned:
            handler = _staged(engine, name, handler)
        around_calls(module.get_submodule(name), handler)


def _tensor_doors(
    module: nn.Module, plan: Plan, engine: MeshEngine, blocks: list[str], replay: ReplayOptions | None
) -> dict[str, BlockDoor]:
    """The doors of the blocks on the tensor axis; inside they are replayed, and experts are local regions."""
    if plan.tensor is None or engine.tensor is None:
        return {}
    parts = {name: module.get_submodule(name) for name in blocks}
    state, regions = engine.tensor, plan.tensor.regions
    run_regions(module, regions, state.group)
    if replay is None:
        return {name: BlockDoor(part) for name, part in parts.items()}
    kept = [module.get_submodule(region.module) for region in regions]
    replays = Replays(parts, state.group, read=state.read, options=replay, kept=kept)
    engine.replays = replays
    return {name: BlockDoor(part, replays.handler(name)) for name, part in parts.items()}


def unwatch_calls(module: nn.Module) -> None:
    """Undoes `watch_calls`."""
    for child in module.modules():
        plain_calls(child)


def _through(visit: Visit, door: Handler) -> Handler:
    return lambda call: visit(partial(door, call))


def _staged(engine: MeshEngine, name: str, inner: Handler) -> Handler:
    """The door of a part that only some stages call: whoever runs the step decides whether it is called here."""
    assert engine.stages is not None
    door = engine.stages.runs.around(name)
    return lambda call: door(
        Call(lambda *args, **kwargs: inner(Call(call.function, args, kwargs)), call.args, call.kwargs)
    )


def _drawing(visit: Handler, streams: RandomStreams, name: str) -> Handler:
    def handler(call: Call) -> Any:
        with streams.stream(name):
            return visit(call)

    return handler
