"""Writing calls of torch down as Python: names for tensors, texts for what else they were given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from lightning_3d.graph.fake_run import OPERATIONS
from lightning_3d.parallel.tensor.replay.caches import is_cache
from lightning_3d.shards.group import ShardGroup

# What is the same object at each call, and is named instead of written out.
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Generator, ShardGroup, SDPBackend)
_TENSOR = re.compile(r"[pvx]\d+")


class Unwritable(Exception):  # noqa: N818 (no error: the block is not replayed)
    """A call cannot be written down so that it means the same later; the text says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line of a program.

    Attributes:
        text: The line.
        makes: Names that it gives to tensors.
        reads: Names of tensors that it uses.
    """

    text: str
    makes: tuple[str, ...]
    reads: tuple[str, ...]


class Constants:
    """What a text calls by name: functions, dtypes, groups.

    Attributes:
        values: By name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def name(self, value: Any, stem: str) -> str:
        """Returns the name of something that is the same object at each call."""
        known = self._names.get(id(value))
        if known is None:
            stem = re.sub(r"\W", "_", stem)
            candidates = (stem, *(f"{stem}_{count}" for count in range(1, len(self.values) + 2)))
            known = next(name for name in candidates if name not in self.values and not _TENSOR.fullmatch(name))
            self._names[id(value)] = known
            self.values[known] = value
        return known


class Writer:
    """Writes calls down, one line each.

    Attributes:
        steps: The lines so far.
        constants: What they call by name and is no tensor.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.constants = Constants()
        self._names: dict[int, str] = {}
        # An id names a tensor only while that lives.
        self._alive: list[Any] = []
        self._reads: dict[str, None] = {}
        self._count = 0

    def name(self, value: Any, name: str) -> None:
        """Gives what comes from outside its name: a tensor or a cache."""
        self._names[id(value)] = name
        self._alive.append(value)

    def knows(self, value: Any) -> bool:
        """Returns whether something has a name."""
        return id(value) in self._names

    def tensor(self, tensor: Tensor) -> str:
        """Returns the name of a tensor.

        Raises:
            Unwritable: It has none.
        """
        name = self._names.get(id(tensor))
        if name is None:
            raise Unwritable(f"a tensor of shape {tuple(tensor.shape)} comes from a place that torch does not tell of")
        self._reads[name] = None
        return name

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Writes a call down and names its results.

        Raises:
            Unwritable: An argument cannot be written.
        """
        self._reads.clear()
        text = self._expression(function, args, kwargs)
        makes: list[str] = []
        target = self._target(result, makes)
        self.steps.append(Step(f"{target} = {text}" if makes else text, tuple(makes), tuple(self._reads)))

    def _expression(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        name = getattr(function, "__name__", type(function).__name__)
        if name == "__get__":
            return self._property(function, args)
        if name == "__getitem__":
            return f"{self._text(args[0])}[{self._index(args[1])}]"
        if name == "__setitem__":
            return f"{self._text(args[0])}[{self._index(args[1])}] = {self._text(args[2])}"
        listed = [self._text(arg) for arg in args] + [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        return f"{self.constants.name(function, name)}({', '.join(listed)})"

    def _property(self, function: Any, args: tuple[Any, ...]) -> str:
        name = function.__self__.__name__
        if name not in OPERATIONS:
            raise Unwritable(f"it reads .{name} of a tensor")
        return f"{self._text(args[0])}.{name}"

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple):
            return ", ".join(self._place(place) for place in index) + ("," if len(index) == 1 else "") or "()"
        return self._place(index)

    def _place(self, place: Any) -> str:
        if not isinstance(place, slice):
            return self._text(place)
        ends = ("" if end is None else self._text(end) for end in (place.start, place.stop))
        return ":".join(ends) + ("" if place.step is None else f":{self._text(place.step)}")

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, (tuple, list)):
            return sequence_text(value, self._text)
        if type(value) is dict:
            return mapping_text(value, self._text)
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if isinstance(value, _NAMED):
            return self.constants.name(value, _stem(value))
        if is_cache(value) and self.knows(value):
            return self._names[id(value)]
        if callable(value) and _is_torchs(value):
            return self.constants.name(value, value.__name__)
        return plain_text(value, self.constants)

    def _target(self, result: Any, makes: list[str]) -> str:
        if isinstance(result, Tensor) and not self.knows(result):
            name = f"v{self._count}"
            self._count += 1
            self.name(result, name)
            makes.append(name)
            return name
        if isinstance(result, (tuple, list)):
            return sequence_text(tuple(result), lambda item: self._target(item, makes))
        return "_"


def plain_text(value: Any, constants: Constants) -> str:
    """Returns the text of a plain value.

    Raises:
        Unwritable: It is none.
    """
    if value is None or value is Ellipsis or type(value) in (bool, int, str, complex):
        return repr(value)
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else constants.name(value, "infinite")
    raise Unwritable(f"a call is given {a_kind(value)}")


def sequence_text(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """Returns the text of a list; of anything else as a tuple."""
    items = [text(value) for value in values]
    if isinstance(values, list):
        return f"[{', '.join(items)}]"
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def mapping_text(values: Mapping[Any, Any], text: Callable[[Any], str]) -> str:
    """Returns the text of a dict."""
    return f"{{{', '.join(f'{key!r}: {text(value)}' for key, value in values.items())}}}"


def a_kind(value: Any) -> str:
    """Returns the class of a value, as a reader knows it."""
    if callable(value) and not isinstance(value, nn.Module):
        return "a function"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def write_function(name: str, arguments: Iterable[str], steps: Iterable[Step], results: str) -> str:
    """Returns the text of a function that runs the steps; it lets go of each value after its last use.

    Args:
        name: Of the function.
        arguments: Names of the tensors that it is given.
        steps: Its lines.
        results: What it returns.
    """
    lines = list(steps)
    kept = set(_TENSOR.findall(results))
    last = {used: index for index, step in enumerate(lines) for used in (*step.makes, *step.reads)}
    text = [f"def {name}({', '.join(arguments)}):"]
    for index, step in enumerate(lines):
        text.append(f"    {step.text}")
        ends = (used for used in dict.fromkeys((*step.reads, *step.makes)) if last[used] == index and used not in kept)
        # What was handed in lives on anyway.
        dead = [used for used in ends if used.startswith("v")]
        if dead:
            text.append(f"    del {', '.join(dead)}")
    return "\n".join([*text, f"    return {results}", ""])


def define(text: str, name: str, names: Mapping[str, Any]) -> Any:
    """Returns a function from its text and what the text names."""
    namespace = dict(names)
    exec(compile(text, f"<replay {name}>", "exec"), namespace)
    return namespace[name]


def _stem(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "group" if isinstance(value, ShardGroup) else type(value).__name__.lower()


def _is_torchs(function: Any) -> bool:
    """Returns whether a function that is handed to a node depends on nothing that may change."""
    module = getattr(function, "__module__", None) or "torch"
    return module.partition(".")[0] == "torch" and getattr(function, "__closure__", None) is None
