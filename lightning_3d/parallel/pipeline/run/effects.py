"""What a call changes in its arguments: key-value caches above all, which every rank has to have alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from lightning_3d.graph.quiet import is_of_the_user

# From the pair (args, kwargs) to a part of it: keys and indices, attributes as names behind a dot.
Path = tuple[Any, ...]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type)


@dataclass(frozen=True, slots=True)
class Effect:
    """One change.

    Attributes:
        path: Where it is.
        content: What is there now: of a tensor its values, of a list or dict what it holds, of an object its
            attributes.
    """

    path: Path
    content: Any


class Arguments:
    """The arguments of a call, as they are before it.

    Args:
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._root = (args, kwargs)
        self._before = {path: (value, _mark(value)) for path, value in _walk(self._root, (), set())}
        paths: dict[int, Path] = {}
        for path, (value, _) in self._before.items():
            paths.setdefault(id(value), path)
        self.paths: Mapping[int, Path] = MappingProxyType(paths)

    def at(self, path: Path) -> Any:
        """Returns what lay at a path before the call."""
        return self._before[path][0]

    def effects(self) -> list[Effect]:
        """Returns what the call has changed."""
        found = []
        for path, (value, mark) in self._before.items():
            if isinstance(value, Tensor):
                if not _same_values(value, mark):
                    # Another object: the one that was there is known by its path.
                    found.append(Effect(path, value.detach()))
            elif mark is not None and not _same_content(mark, _mark(value)):
                found.append(Effect(path, _content(value)))
        return found

    def apply(self, effects: list[Effect]) -> None:
        """Makes changes that another rank has found."""
        for effect in effects:
            value = self.at(effect.path)
            if isinstance(value, Tensor):
                value.copy_(effect.content)
            elif isinstance(value, list):
                value[:] = effect.content
            else:
                entries = value if isinstance(value, dict) else vars(value)
                for key in entries.keys() - effect.content.keys():
                    del entries[key]
                entries.update(effect.content)


def _walk(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    if isinstance(value, Tensor):
        return
    if isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _walk(part, (*path, index), seen)
    elif isinstance(value, dict):
        for key, part in list(value.items()):
            yield from _walk(part, (*path, key), seen)
    elif _has_attributes(value):
        for key, part in list(vars(value).items()):
            yield from _walk(part, (*path, f".{key}"), seen)


def _has_attributes(value: Any) -> bool:
    """Whether a value is a plain object of the user's."""
    if isinstance(value, nn.Module) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and is_of_the_user(type(value))


def _mark(value: Any) -> Any:
    """What tells whether a part has changed; None if it cannot."""
    if isinstance(value, Tensor):
        # Tensors of the inference mode count no changes.
        return value.clone() if value.is_inference() else value._version
    content = _content(value)
    return content if isinstance(content, (list, dict)) else None


def _content(value: Any) -> Any:
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if not isinstance(value, tuple) and _has_attributes(value) else None


def _same_values(value: Tensor, mark: Any) -> bool:
    if isinstance(mark, Tensor):
        return mark.shape == value.shape and bool((mark == value).all())
    return bool(value._version == mark)


def _same_content(before: Any, after: Any) -> bool:
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return list(before) == list(after) and all(_same(before[key], after[key]) for key in before)


def _same(before: Any, after: Any) -> bool:
    # Numbers and texts are made again for the same value.
    return before is after or (isinstance(before, _PLAIN) and type(before) is type(after) and before == after)
