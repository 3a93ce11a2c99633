"""Running a step without leaving a trace: metrics, attributes, buffers, randomness and logs are put back."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from lightning_3d.graph.calls import shadow


@contextmanager
def quiet(module: LightningModule, *beside: object, keep_log: bool = False) -> Iterator[None]:
    """Context in which calls of the module's steps leave no trace in it.

    Put back at the end: the attributes of every sub-module, what their collections, tensors and generators hold
    (metrics' states and buffers among them), the attributes of plain objects among them, and the random states of
    torch, Python and numpy. Iterators among the attributes give again what was taken. Loggers and the profiler hear
    nothing, and ``self.print`` says nothing.

    Args:
        module: The module whose steps run inside.
        beside: Plain objects whose methods run inside too, as a data module's.
        keep_log: Leave ``module.log`` alone, for a caller that listens to it itself; else it does nothing inside.
    """
    with ExitStack() as at_end:
        at_end.callback(_set_rng_states, _collect_rng_states(include_cuda=torch.cuda.is_initialized()))
        memory = _Memory()
        at_end.callback(memory.restore)
        memory.add_tree(module)
        for each in beside:
            memory.add_value(each)
        if module._trainer is not None:
            at_end.callback(_mute(module._trainer))
        at_end.callback(shadow(module, "print", silent))
        if not keep_log:
            at_end.callback(shadow(module, "log", silent))
        yield


def _put(tensor: Tensor, content: Tensor) -> None:
    # Graphs of earlier steps may hold the tensor, and would take a write that they can see for a change.
    tensor.data.copy_(content)


def silent(*args: Any, **kwargs: Any) -> None:
    """Stands in for what says something."""


def _mute(trainer: Trainer) -> Callable[[], None]:
    # Lightning gives a Trainer its profiler without saying so in the class.
    told: Any = trainer
    loggers, profiler = told.loggers, told.profiler
    told.loggers, told.profiler = [DummyLogger() for _ in loggers], PassThroughProfiler()

    def hear() -> None:
        told.loggers, told.profiler = loggers, profiler

    return hear


class _Memory:
    """What modules held, and how to put it back."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], object]] = []
        self._seen: set[int] = set()

    def restore(self) -> None:
        """Puts everything back."""
        with torch.no_grad():
            for restore in reversed(self._restores):
                restore()

    def add_tree(self, module: nn.Module) -> None:
        """Remembers a module and its sub-modules, each once."""
        if id(module) in self._seen:
            return
        for child in module.modules():
            if not self._known(child):
                self.add_module(child)

    def add_module(self, module: nn.Module) -> None:
        """Remembers a module's attributes and their contents, not its sub-modules and parameters."""
        attributes = vars(module)
        for key, value in attributes.items():
            if isinstance(value, Iterator):
                kept, attributes[key] = itertools.tee(value)
                self._restores.append(partial(attributes.__setitem__, key, kept))
        self._add_dict(attributes)
        for key, value in attributes.items():
            if key not in ("_trainer", "_fabric"):
                self.add_value(value)
        for buffer in module._buffers.values():
            self.add_value(buffer)

    def add_value(self, value: Any) -> None:
        """Remembers what a value holds, unless it is a module; of plain objects only the user's own."""
        if isinstance(value, (*_PLAIN, nn.Module)) or self._known(value):
            return
        if isinstance(value, _COLLECTIONS):
            self._add_collection(value)
        elif isinstance(value, Tensor):
            if not value.is_meta and not isinstance(value, nn.Parameter):
                self._restores.append(partial(_put, value, value.clone()))
        elif self._add_generator(value):
            return
        elif is_of_the_user(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            self._add_collection(vars(value))

    def _add_generator(self, value: Any) -> bool:
        """Remembers the state of a generator of random numbers; returns whether the value is one."""
        if isinstance(value, (torch.Generator, np.random.RandomState)):
            generator: Any = value
            self._restores.append(partial(generator.set_state, generator.get_state()))
        elif isinstance(value, random.Random):
            self._restores.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._restores.append(partial(setattr, bits, "state", bits.state))
        else:
            return False
        return True

    def _add_collection(self, value: Any) -> None:
        """Remembers what a collection holds, and the collections in it."""
        if isinstance(value, dict):
            self._add_dict(value)
            held: Any = list(value.values())
        else:
            held = list(value)
            self._restores.append(partial(_refill, value, held))
        for part in held:
            if isinstance(part, nn.Module):
                self.add_tree(part)
            elif isinstance(part, _COLLECTIONS) and not self._known(part):
                self._add_collection(part)
            elif type(part) is Tensor and part.numel() <= _SMALL:
                # A running sum; what a step only gathers may be large.
                self.add_value(part)
            else:
                self._add_generator(part)

    def _add_dict(self, value: dict[Any, Any]) -> None:
        self._restores.append(partial(_refill_dict, value, dict(value)))

    def _known(self, value: Any) -> bool:
        known = id(value) in self._seen
        self._seen.add(id(value))
        return known


_PLAIN = (bool, int, float, str, type(None))
_COLLECTIONS = (list, dict, set, deque)
# Elements of a tensor in a collection that is copied.
_SMALL = 2**18
# Objects of these hold the state of a run, not of a step.
_LIBRARIES = ("builtins", "types", "functools", "torch", "lightning", "lightning_3d")


def is_of_the_user(kind: type) -> bool:
    """Returns whether a class comes from neither Python, torch, Lightning nor the library."""
    return kind.__module__.split(".")[0] not in _LIBRARIES


def _refill(value: Any, held: list[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(held)


def _refill_dict(value: dict[Any, Any], held: dict[Any, Any]) -> None:
    same = len(value) == len(held) and all(value.get(key, held) is item for key, item in held.items())
    if not same:
        value.clear()
        value.update(held)
