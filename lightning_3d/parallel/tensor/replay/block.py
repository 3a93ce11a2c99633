"""A block that is recorded at its first call of each kind and replayed from then on."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack

from lightning_3d.graph.calls import Call, around_forward, forward_is_handled
from lightning_3d.log import get_logger
from lightning_3d.parallel.tensor.replay.changes import Changes, hook_tables, unwatch, watch
from lightning_3d.parallel.tensor.replay.check import check
from lightning_3d.parallel.tensor.replay.guards import Guard, Signature, read_signature
from lightning_3d.parallel.tensor.replay.modes import PlainCalls
from lightning_3d.parallel.tensor.replay.program import Bodies, Program, Read, present_parameters
from lightning_3d.parallel.tensor.replay.recording import Recording
from lightning_3d.parallel.tensor.replay.writer import Unwritable
from lightning_3d.shards.group import ShardGroup

_log = get_logger(__name__)
_HOOKED = "a module inside has a hook"
# A recording costs as much as some dozens of calls, so it must be followed by as many.
_CALLS_PER_RECORDING = 100
# What a part of a block needs to be worth its guards.
_SMALLEST_PART = 3
# Forwards that can wait for their recomputation at a time.
_MOST_FORWARDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How blocks are replayed.

    Attributes:
        capacity: Kinds of input that a block remembers; the one used longest ago makes room.
        check_every: Calls of a kind between two checks against the block itself; the second call is always checked.
        compile: Programs are compiled when they have passed their first check.
        backend: Of ``torch.compile``; None = its default.
    """

    capacity: int = 8
    check_every: int = 1000
    compile: bool = False
    backend: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockReport:
    """What became of a block.

    Attributes:
        name: Name of the block; of a part its name in the block.
        replayed: Whether it was recorded and has not been found wrong.
        reason: Why not, or why it is not compiled.
        parts: The parts that were tried in its place.
    """

    name: str
    replayed: bool
    reason: str | None
    parts: tuple[BlockReport, ...] = ()

    def __str__(self) -> str:
        if self.replayed:
            return f"{self.name}: replayed" + (f", not compiled: {self.reason}" if self.reason else "")
        replayed = [part for part in self.flat() if part.replayed]
        inside = f"; replayed inside: {', '.join(part.name for part in replayed)}" if replayed else ""
        return f"{self.name}: not replayed: {self.reason or 'not called yet'}{inside}"

    def flat(self) -> Iterator[BlockReport]:
        """Yields its parts and theirs."""
        for part in self.parts:
            yield part
            yield from part.flat()


# For each parameter of a block, whether it wants a gradient.
Wanted = list[bool]


class _Entry:
    """A kind of input: its guard, and its program or none if the block cannot be replayed for it."""

    __slots__ = ("changes", "compiled", "due", "guard", "program", "recomputed", "wanted")

    def __init__(self, guard: Guard, program: Program | None, changes: int, wanted: Wanted) -> None:
        self.guard = guard
        self.program = program
        self.changes = changes
        self.wanted = wanted
        # Calls until the next check: the second call has one.
        self.due = 1
        # Of a checkpoint whose forward has no gradients. All others are checked in forward only: selective
        # checkpointing wants the same operations of both.
        self.recomputed = _recomputing()
        # Whether the forwards that may be recomputed were compiled calls, the oldest first.
        self.compiled: deque[bool] = deque([False], maxlen=_MOST_FORWARDS)


class Replay:
    """Replays a module. Whatever is in doubt runs as it is, on shards.

    Args:
        module: A block, or a part of one.
        group: The tensor axis.
        read: Returns the plain local leaf of a parameter, the same that a shard in the block's code holds.
        name: For reports.
        options: How it is replayed.
        bodies: Shared by all blocks.
        kept: Modules inside that are never parts of their own.
        part: Whether a block around it runs as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ShardGroup,
        *,
        read: Read,
        name: str = "",
        options: ReplayOptions | None = None,
        bodies: Bodies | None = None,
        kept: Collection[nn.Module] = (),
        part: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.parts: tuple[Replay, ...] = ()
        self._group = group
        self._read = read
        self._options = options or ReplayOptions()
        self._bodies = bodies if bodies is not None else Bodies()
        self._kept = kept
        self._part = part
        self._entries: list[_Entry] = []
        self._changes = Changes()
        self._modules: tuple[nn.Module, ...] = ()
        self._hooks: tuple[Mapping[Any, Any], ...] = ()
        self._tables: tuple[Mapping[str, nn.Parameter | None], ...] = ()
        self._warned = False
        self._start()

    def handle(self, call: Call) -> Any:
        """Makes a call of the module's ``forward``; a handler of `lightning_3d.graph.calls.around_forward`."""
        if self._retired or any(self._hooks):
            return self._as_it_is(call)
        args, kwargs, wanted = call.args, call.kwargs, self._wanted()
        for entry in self._entries:
            # Of a weight that wants no gradient, backward would not sum what others need either.
            inputs = entry.guard(args, kwargs) if entry.wanted == wanted else None
            if inputs is not None:
                if entry is not self._entries[0]:
                    self._entries.remove(entry)
                    self._entries.insert(0, entry)
                program = entry.program
                if program is None:
                    return self._as_it_is(call)
                if entry.recomputed != _recomputing():
                    return self._recomputed(entry, program, inputs)
                self._hits += 1
                entry.due -= 1
                if self._options.compile and torch.is_grad_enabled():
                    entry.compiled.append(bool(entry.due) and program.body.is_compiled)
                return program.run(inputs) if entry.due else self._checked(entry, program, inputs, call)
        return self._first(call)

    def flush(self) -> None:
        """Forgets everything; the next call is recorded anew."""
        self._start()
        for part in self.parts:
            part.flush()

    def report(self) -> BlockReport:
        """Returns what became of the block."""
        programs = [entry.program for entry in self._entries if entry.program is not None]
        replayed = bool(programs) and not self._retired and not any(self._hooks)
        problems = (program.body.problem for program in programs)
        reason = next(filter(None, problems), None) if replayed else self._retired or self._reason
        if any(self._hooks):
            reason = _HOOKED
        parts = () if replayed else tuple(part.report() for part in self.parts)
        return BlockReport(name=self.name, replayed=replayed, reason=reason, parts=parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        """A copy of the module has recordings of its own."""
        module = copy.deepcopy(self.module, memo)
        return self._like(module, self.name, part=self._part)

    def _like(self, module: nn.Module, name: str, *, part: bool) -> Replay:
        return Replay(
            module,
            self._group,
            read=self._read,
            name=name,
            options=self._options,
            bodies=self._bodies,
            kept=self._kept,
            part=part,
        )

    def _start(self) -> None:
        self._entries.clear()
        self._retired: str | None = None
        self._reason: str | None = None
        self._hits = self._recordings = 0

    def _look_inside(self) -> None:
        modules = tuple(self.module.modules())
        if modules != self._modules:
            unwatch(self._modules, self._changes)
            watch(modules, self._changes)
            self._modules = modules
            self._hooks = hook_tables(modules[1:])
            self._tables = tuple(module._parameters for module in modules if module._parameters)

    def _wanted(self) -> Wanted:
        """Of which parameters gradients are wanted now."""
        return [
            parameter is not None and parameter.requires_grad for table in self._tables for parameter in table.values()
        ]

    def _as_it_is(self, call: Call) -> Any:
        if self._part and self._retired:
            return call()
        # Replayed or not, a block shares no sum of gradients with another, so ranks meet in the same exchanges.
        self._group.forget_copies()
        try:
            return call()
        finally:
            self._group.forget_copies()

    def _checked(self, entry: _Entry, program: Program, inputs: tuple[Any, ...], call: Call) -> Any:
        entry.due = 1
        result, difference = check(program, inputs, lambda: self._as_it_is(call))
        entry.due = self._options.check_every
        if difference is not None:
            self._retired = f"its recording was not what it did at a later call: {difference}"
            self._entries.clear()
            if not self._warned:
                _log.warning("'%s' is not replayed: %s.", self.name, self._retired)
                self._warned = True
        elif self._options.compile:
            program.body.compile(self._options.backend)
        return result

    @staticmethod
    def _recomputed(entry: _Entry, program: Program, inputs: tuple[Any, ...]) -> Any:
        """Runs the forward of a checkpoint again, by the same operations: selective checkpointing counts on it."""
        compiled = entry.compiled.popleft() if entry.compiled else program.body.is_compiled
        return program.run(inputs) if compiled else program.body.plainly(lambda: program.run(inputs))

    def _first(self, call: Call) -> Any:
        """Makes a call of a kind that is not known yet."""
        self._look_inside()
        self._reason = self._hindrance()
        if self._reason is not None:
            return self._as_it_is(call)
        signature = self._signature(call)
        return self._as_it_is(call) if signature is None else self._recorded(call, signature)

    def _signature(self, call: Call) -> Signature | None:
        try:
            return read_signature(call.args, call.kwargs)
        except Unwritable as unwritable:
            self._reason = str(unwritable)
            self._split()
            return None

    def _hindrance(self) -> str | None:
        if self._recordings >= self._options.capacity + self._hits // _CALLS_PER_RECORDING:
            return "its inputs or attributes change too often"
        if any(self._hooks):
            return _HOOKED
        if sys.getprofile() is not None:
            return "a Python profiler is on"
        if torch.is_inference_mode_enabled():
            return "inference mode is on"
        if any(isinstance(mode, PlainCalls) for mode in _get_current_function_mode_stack()):
            return "it was first called inside another block"
        names = ((module, name) for module in self._modules for name in present_parameters(module))
        if any(isinstance(getattr(module, name), DTensor) for module, name in names):
            return "it was first called outside of a step"
        return None

    def _recorded(self, call: Call, signature: Signature) -> Any:
        self._recordings += 1
        recording = Recording(signature, self._modules, self._read, self._changes)
        result = recording.make(lambda: self._as_it_is(call))
        program = recording.program(result, self._bodies)
        if program is not None and self._part and recording.length < _SMALLEST_PART:
            self._retired = "it is too small to gain from it"
        elif recording.refusal is not None:
            self._retired = recording.refusal if recording.attributes_written else None
            self._reason = recording.refusal
            self._split()
        count = self._changes.count
        others = [entry for entry in self._entries if entry.changes == count]
        entry = _Entry(recording.guard(), program, count, self._wanted())
        self._entries = [entry, *others[: self._options.capacity - 1]]
        return result

    def _split(self) -> None:
        """Makes the module's parts replays of their own, for when it runs as it is."""
        if self.parts or any(entry.program is not None for entry in self._entries):
            return
        self.parts = tuple(
            self._like(child, name, part=True)
            for name, child in _callable_parts(self.module, self.name)
            if not forward_is_handled(child) and not any(child is other for other in self._kept)
        )
        for part in self.parts:
            around_forward(part.module, part.handle)


def _callable_parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the largest modules inside that are called, with their names; lists of modules are not."""
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if type(child).forward is nn.Module.forward or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_parts(child, inner)
        else:
            yield inner, child


def _recomputing() -> bool:
    """Whether a backward runs, which computes again what a forward has computed."""
    return bool(torch._C._current_graph_task_id() != -1)
