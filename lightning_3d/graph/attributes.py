"""Plain attributes of a module: how they were at one time, what has changed since, and putting them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_3d.graph.blocks import parents
from lightning_3d.graph.calls import OURS

# Name of a module, name of an attribute, then keys and indices.
Path = tuple[Any, ...]

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_COLLECTIONS = (list, dict, set, deque)
# Lightning's and torch's own.
_INTERNAL = frozenset(vars(LightningModule()))
_NO_STATE = (nn.Module, nn.Parameter, FunctionType, MethodType, BuiltinFunctionType, type)
# Elements of a tensor that is copied, should a step change it in place.
_SMALL = 2**18
_NOTHING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of an attribute, or in a collection or tensor that one holds.

    Attributes:
        path: Where it is.
        kind: What has become of it: another value, no value, more entries at its end, other entries, other numbers.
        content: The value, the entries or the numbers.
    """

    path: Path
    kind: Literal["value", "gone", "more", "entries", "numbers"]
    content: Any = None

    def __str__(self) -> str:
        module, name, *rest = self.path
        return f"{module}.{name}".lstrip(".") + "".join(f"[{key!r}]" for key in rest)


class Attributes:
    """The plain attributes of a module, and of those in it that hold its blocks.

    Numbers, texts, tensors, lists, dicts, sets and deques, also in each other, and whatever else a name is given anew.
    What happens inside of other objects is not seen, nor are parameters, buffers and modules.

    Args:
        module: The module.
        blocks: Names of its blocks.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[str]) -> None:
        self._modules = {name: module.get_submodule(name) for name in ("", *sorted(parents(blocks)))}

    def now(self, *, copies: bool = False) -> Held:
        """Returns what they are.

        Args:
            copies: Copy tensors, so that numbers that are changed in place can be put back; not the largest.
        """
        return Held({name: vars(module) for name, module in self._modules.items()}, copies=copies)

    def change(self, changes: Iterable[Change]) -> None:
        """Makes changes that another rank has found, from the same beginning."""
        tables = {name: vars(module) for name, module in self._modules.items()}
        # Places are those before all changes.
        for change, place in [(change, _place(tables, change)) for change in changes]:
            _make(change, place)


class Held:
    """What attributes were at one time.

    Args:
        tables: The attributes of modules by name.
        copies: Copy tensors.
    """

    def __init__(self, tables: dict[str, dict[str, Any]], *, copies: bool) -> None:
        self._copies = copies
        self._collections: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, int | None, Tensor | None]] = {}
        self._tables = {name: (table, _plain(table)) for name, table in tables.items()}
        for _, held in self._tables.values():
            self._note(held.values())

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is Tensor:
                if id(value) not in self._tensors:
                    self._tensors[id(value)] = (value, *self._mark(value))
            elif issubclass(kind, _COLLECTIONS):
                if id(value) not in self._collections:
                    content = _content(value)
                    self._collections[id(value)] = value, content
                    self._note(content.values() if isinstance(content, dict) else content)
            elif kind is tuple:
                self._note(value)

    def _mark(self, value: Tensor) -> tuple[int | None, Tensor | None]:
        # Tensors of the inference mode count no changes.
        version = None if value.is_inference() else value._version
        copied = not value.is_meta and (version is None or (self._copies and value.numel() <= _SMALL))
        return version, value.detach().clone() if copied else None

    # ---- what has changed ----

    @property
    def changed(self) -> bool:
        """Whether anything has changed since."""
        return next(self._found(), None) is not None

    def changes(self) -> tuple[Change, ...]:
        """Returns what has changed since."""
        found = list(self._found())
        if not found:
            return ()
        paths = self._paths()
        return tuple(change for value, now in found for change in _changes(paths[id(value)], now, self._before(value)))

    def _found(self) -> Iterator[tuple[Any, Any]]:
        """Yields what has changed, and what it is now."""
        for table, held in self._tables.values():
            now = _plain(table)
            if not _same_entries(held, now):
                yield table, now
        for value, content in self._collections.values():
            if not _same_entries(content, value):
                yield value, value
        for value, version, copy in self._tensors.values():
            if _differs(value, version, copy):
                yield value, value

    def _before(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value
        if id(value) in self._collections:
            return self._collections[id(value)][1]
        return next(held for table, held in self._tables.values() if table is value)

    def _paths(self) -> dict[int, Path]:
        """Returns where everything was that can change."""
        found: dict[int, Path] = {id(table): (name,) for name, (table, _) in self._tables.items()}

        def walk(parts: Iterable[tuple[Any, Any]], path: Path) -> None:
            for key, value in parts:
                if id(value) in found:
                    continue
                if id(value) in self._collections:
                    found[id(value)] = (*path, key)
                    walk(_parts(self._collections[id(value)][1]), found[id(value)])
                elif id(value) in self._tensors:
                    found[id(value)] = (*path, key)
                elif type(value) is tuple:
                    walk(enumerate(value), (*path, key))

        for name, (_, held) in self._tables.items():
            walk(held.items(), (name,))
        return found

    # ---- putting back ----

    def put_back(self) -> None:
        """Makes everything what it was."""
        for table, held in self._tables.values():
            now = _plain(table)
            if not _same_entries(held, now):
                for name in now.keys() - held.keys():
                    del table[name]
                table.update(held)
        for value, content in self._collections.values():
            if not _same_entries(content, value):
                _refill(value, content)
        for value, version, copy in self._tensors.values():
            if copy is not None and _differs(value, version, copy):
                _write(value, copy)


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in table.items()
        if name not in _INTERNAL
        and not name.startswith(OURS)
        and (type(value) in _PLAIN or not isinstance(value, _NO_STATE))
    }


def _content(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _parts(content: Any) -> Iterable[tuple[Any, Any]]:
    return content.items() if isinstance(content, dict) else enumerate(content)


def _same(before: Any, after: Any) -> bool:
    # Numbers and texts are made again for the same value.
    return before is after or (type(before) in _PLAIN and type(before) is type(after) and bool(before == after))


def _same_entries(before: Any, after: Any) -> bool:
    if len(before) != len(after):
        return False
    if isinstance(after, dict):
        if all(map(is_, before.values(), after.values())) and all(map(is_, before, after)):
            return True
        return all(_same(value, after.get(key, _NOTHING)) for key, value in before.items())
    return all(map(is_, before, after)) or all(map(_same, before, after))


def _differs(value: Tensor, version: int | None, copy: Tensor | None) -> bool:
    if version is not None:
        return bool(value._version != version)
    return copy is not None and not (copy.shape == value.shape and bool((copy == value).all()))


def _changes(path: Path, value: Any, before: Any) -> Iterator[Change]:
    if isinstance(value, Tensor):
        yield Change(path=path, kind="numbers", content=value)
    elif isinstance(value, dict):
        for key in before.keys() - value.keys():
            yield Change(path=(*path, key), kind="gone")
        for key, entry in value.items():
            if not _same(before.get(key, _NOTHING), entry):
                yield Change(path=(*path, key), kind="value", content=entry)
    else:
        entries: Sequence[Any] = list(value)
        count = len(before)
        if not isinstance(value, set) and len(entries) > count and _same_entries(before, entries[:count]):
            yield Change(path=path, kind="more", content=entries[count:])
        else:
            yield Change(path=path, kind="entries", content=entries)


def _place(tables: dict[str, dict[str, Any]], change: Change) -> Any:
    """Returns what is changed, or what holds the entry that is; None if this rank has nothing there."""
    inside = change.kind in ("value", "gone")
    place: Any = tables
    try:
        for key in change.path[:-1] if inside else change.path:
            place = place[key]
    except (KeyError, IndexError, TypeError):
        return None
    return place


def _make(change: Change, place: Any) -> None:
    content, key = change.content, change.path[-1]
    if isinstance(place, dict):
        if change.kind == "value":
            place[key] = content
        else:
            place.pop(key, None)
    elif change.kind == "numbers":
        if isinstance(place, Tensor) and place.shape == content.shape:
            _write(place, content)
    elif isinstance(place, (list, deque)) and change.kind == "more":
        place.extend(content)
    elif isinstance(place, (list, deque, set)):
        _refill(place, content)


def _refill(value: Any, content: Any) -> None:
    value.clear()
    (value.update if isinstance(value, (dict, set)) else value.extend)(content)


def _write(value: Tensor, numbers: Tensor) -> None:
    if value.is_inference():
        with torch.inference_mode():
            value.copy_(numbers)
        return
    # A graph may have kept it as it is now again.
    with torch.no_grad(), _unsafe_preserve_version_counter(value):
        value.copy_(numbers)
