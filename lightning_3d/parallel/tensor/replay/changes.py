"""Noticing what changes in a block between its calls: attributes, training flags, hooks, constants of Python files."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

_WATCHERS = "_mesh_3d_replay_watchers"
_MISSING = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


class Changes:
    """What has been written to the modules of a block.

    Attributes:
        count: Grows with every attribute that gets another value.
        training: One bit for each module, which turns whenever the module goes to training or to evaluation.
    """

    __slots__ = ("count", "training")

    def __init__(self) -> None:
        self.count = 0
        self.training = 0


def watch(modules: tuple[nn.Module, ...], changes: Changes) -> None:
    """Has every write to an attribute of the modules noted in ``changes``.

    Their classes are swapped for subclasses, as FSDP2 does. A module may be watched for several blocks.
    """
    for index, module in enumerate(modules):
        watchers = module.__dict__.setdefault(_WATCHERS, {})
        watchers[id(changes)] = (changes, 1 << index)
        if not any(_WATCHERS in base.__dict__ for base in type(module).__mro__):
            module.__class__ = _watched(type(module))


def unwatch(modules: tuple[nn.Module, ...], changes: Changes) -> None:
    """Stops noting; the classes stay as they are."""
    for module in modules:
        module.__dict__.get(_WATCHERS, {}).pop(id(changes), None)


def _watched(cls: type[nn.Module]) -> type[nn.Module]:
    class Watched(cls):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            if not _is_known(self, name, value):
                _note(self, name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            _note(self, name)
            super().__delattr__(name)

        def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
            # Casts and moves change the data of parameters, not the attributes.
            _note(self, "_apply")
            return super()._apply(fn, recurse)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    setattr(Watched, _WATCHERS, None)
    return Watched


def _note(module: nn.Module, name: str) -> None:
    for changes, bit in module.__dict__.get(_WATCHERS, {}).values():
        if name == "training":
            changes.training ^= bit
        else:
            changes.count += 1


def _is_known(module: nn.Module, name: str, value: Any) -> bool:
    """Returns whether a write changes nothing that a program relies on."""
    before = module.__dict__.get(name, _MISSING)
    if before is value or (type(value) in _PLAIN and type(before) is type(value) and before == value):
        return True
    # FSDP2 exchanges the forms of a parameter by this door if a class has a `__setattr__` of its own.
    return isinstance(value, DTensor) and isinstance(module._parameters.get(name), DTensor)


def hook_tables(modules: tuple[nn.Module, ...]) -> tuple[Mapping[Any, Any], ...]:
    """Returns the tables of the modules' hooks and of the hooks of all modules; they are empty while there are none."""
    own = [module.__dict__[name] for module in modules for name in _HOOKS]
    return (*own, *(getattr(torch_module, f"_global{name}") for name in _HOOKS))


class PlainGlobals:
    """Plain values of Python files that functions may read: a constant at the top of a file that someone changes.

    Attributes:
        found: Namespace, name and value of each.
    """

    def __init__(self) -> None:
        # By id: what torch.compile generates may hold constants that have no hash.
        self._codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self.found: tuple[tuple[dict[str, Any], str, Any], ...] = ()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context whose Python functions are noted, those of torch, of this package and of Python aside."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.found = tuple(self._read())

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self._codes.setdefault(id(frame.f_code), (frame.f_code, frame.f_globals))

    def _read(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        seen: set[tuple[int, str]] = set()
        for code, namespace in self._codes.values():
            if not _is_users(namespace.get("__name__", "")):
                continue
            for name in code.co_names:
                value = namespace.get(name, _MISSING)
                if (id(namespace), name) not in seen and not name.startswith("__") and _is_plain(value):
                    seen.add((id(namespace), name))
                    yield namespace, name, copy.deepcopy(value)


def _is_users(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in ("torch", "lightning_3d") and package not in sys.stdlib_module_names


def _is_plain(value: Any, depth: int = 2) -> bool:
    if type(value) in _PLAIN:
        return True
    if not depth or type(value) not in (list, tuple, dict) or len(value) > 16:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_plain(item, depth - 1) for item in items)
