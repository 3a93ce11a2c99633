"""Hidden values of one run of a step, by identity: who made each, and which functions are counted.

The same bookkeeping serves the recording of a step and the runs of its stages, so that both give the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.graph.fake_run import is_attribute
from lightning_3d.parallel.pipeline.record.step import (
    ArgumentLeaf,
    ConstantLeaf,
    HiddenLeaf,
    Leaf,
    Origin,
    Structure,
)
from lightning_3d.shards.protocol import storage_key, writes_to_first
from lightning_3d.shards.tensor import ShardTensor

Function = Callable[..., Any]

# What they tell of a tensor is known of a placeholder too.
_ABOUT = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device", "element_size"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_tensor", "is_inference"}
    | {"__len__", "__hash__", "__repr__", "__str__", "data_ptr", "is_shared", "has_names", "is_storage", "result_type"}
    | {"requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "is_set_to"}
)
# What most arguments are, and has no parts.
_PLAIN = (Tensor, bool, int, float, str, type(None))


def leaves(tree: Any) -> list[Any]:
    """Returns the flat parts of arguments or of an output: those of torch's pytree, found faster in the usual ones."""
    kind = type(tree)
    if kind is tuple or kind is list:
        parts = tree
    elif kind is dict:
        parts = tree.values()
    else:
        return [tree] if isinstance(tree, _PLAIN) else pytree.tree_leaves(tree)
    found: list[Any] = []
    for part in parts:
        if isinstance(part, _PLAIN):
            found.append(part)
        else:
            found.extend(leaves(part))
    return found


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Returns arguments or an output with other flat parts, as torch's pytree does, faster for the usual ones."""
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(change, part) for part in tree])
    if kind is list:
        return [mapped(change, part) for part in tree]
    if kind is dict:
        return {key: mapped(change, part) for key, part in tree.items()}
    return change(tree) if isinstance(tree, _PLAIN) else pytree.tree_map(change, tree)


def counted(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], is_hidden: Callable[[object], bool]
) -> bool:
    """Returns whether a function at the level of containers is counted: it computes with hidden values or parameters.

    What works on the batch alone is not, so that masks and positions may be computed in another way on another rank.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_hidden: Whether something is a hidden value or a parameter.
    """
    if getattr(function, "__name__", "") in _ABOUT or is_attribute(function):
        return False
    return any(map(is_hidden, leaves((args, kwargs))))


def written(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns what a function of torch changes: what it is given as ``out``, or its first argument."""
    if kwargs.get("out") is not None:
        return leaves(kwargs["out"])
    if writes_to_first(function) or _is_told_in_place(function, args, kwargs):
        return [args[0] if args else kwargs.get("input")]
    return []


def _is_told_in_place(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return any(name == "inplace" and bool(value) for name, value in zip(code.co_varnames, args, strict=False))


@dataclass(slots=True, eq=False)
class Hidden:
    """A hidden value.

    Attributes:
        value: The tensor, kept so that its identity lasts.
        origin: Who made it, or wrote to it last.
        position: Blocks that had begun then.
        requires_grad: Whether it needed a gradient then.
        used: Position of its last use.
        stale: Whether another tensor was written to since then, after a block, that shares its memory: on another
            stage the two would be apart.
        base: What it is a view of, or was before it was written to; only where memory is watched.
    """

    value: Tensor
    origin: Origin
    position: int
    requires_grad: bool
    used: int = -1
    stale: bool = False
    base: Hidden | None = None

    def root(self, position: int) -> Hidden:
        """Returns what it is part of on a stage that receives all that was made before a position, each by itself."""
        found = self
        while found.position >= position and found.base is not None:
            found = found.base
        return found


class HiddenValues:
    """All hidden values of one run, in the order in which they were made.

    Args:
        watch_memory: Note which of them are stale.
    """

    def __init__(self, *, watch_memory: bool = False) -> None:
        self._watch_memory = watch_memory
        self._now: dict[int, Hidden] = {}
        self._all: list[Hidden] = []
        self._calls: Counter[str] = Counter()
        self._functions = 0

    def __iter__(self) -> Iterator[Hidden]:
        return iter(self._all)

    def by_origin(self) -> dict[Origin, Tensor]:
        """Returns the values by who made them, or wrote to them last."""
        return {hidden.origin: hidden.value for hidden in self._all}

    def find(self, value: object) -> Hidden | None:
        """Returns what is known of a value; None if it is not hidden."""
        return self._now.get(id(value))

    def count(self, module: str) -> int:
        """Returns the number of a call of a module that begins now."""
        number = self._calls[module]
        self._calls[module] += 1
        return number

    def made(self, value: Tensor, origin: Origin, position: int, inputs: Sequence[Any] = ()) -> None:
        """Notes a tensor as new, or as written to, by its origin.

        Args:
            value: The tensor.
            origin: Who made it.
            position: Blocks that had begun.
            inputs: What it was made from.
        """
        found = Hidden(value=value, origin=origin, position=position, requires_grad=value.requires_grad)
        if self._watch_memory:
            known = filter(None, map(self.find, inputs))
            found.base = next((hidden for hidden in known if _share_memory(hidden.value, value)), None)
        self._now[id(value)] = found
        self._all.append(found)

    def made_by_call(self, origin: Origin, output: Any, position: int, arguments: Sequence[Any]) -> None:
        """Notes the output of a call of a watched module.

        Args:
            origin: Of its first output.
            output: What it returned.
            position: Blocks that had begun.
            arguments: The flat arguments: what is passed through keeps its origin.
        """
        seen = {id(leaf) for leaf in arguments}
        for index, leaf in enumerate(leaves(output)):
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                self.made(leaf, numbered(origin, index), position, arguments)

    def made_by_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, position: int
    ) -> None:
        """Notes the result of a counted function at the level of containers; its number is that of these calls."""
        name = getattr(function, "__name__", str(function))
        origin = Origin(kind="function", maker=name, call=self._functions)
        self._functions += 1
        changed = written(function, args, kwargs)
        for value in changed:
            self._overwritten(value, position)
        # __setitem__ returns nothing.
        results = changed if output is None else leaves(output)
        inputs = leaves((args, kwargs)) if self._watch_memory else ()
        for index, leaf in enumerate(results):
            if isinstance(leaf, Tensor) and (id(leaf) not in self._now or any(leaf is value for value in changed)):
                self.made(leaf, numbered(origin, index), position, inputs)

    def _overwritten(self, value: Any, position: int) -> None:
        """Notes which other values have changed with one, and would not on a stage that was sent both."""
        changed = self.find(value)
        if changed is None or not self._watch_memory:
            return
        root = changed.root(position)
        for other in self._now.values():
            apart = other.root(position)
            if apart is not root and max(apart.position, root.position) < position:
                other.stale = other.stale or _share_memory(other.value, value)


def numbered(origin: Origin, output: int) -> Origin:
    """Returns the origin of another output of the same call."""
    if output == origin.output:
        return origin
    return Origin(kind=origin.kind, maker=origin.maker, call=origin.call, output=output)


def structure(output: Any, arguments: Sequence[Any], outer: Sequence[Any] = ()) -> Structure:
    """Returns an output without its values.

    Args:
        output: What a call returned.
        arguments: Flat arguments of the call, or of the one around it for what is returned inside.
        outer: Flat output of the call around it.
    """
    parts, spec = pytree.tree_flatten(output)
    places = {id(leaf): index for index, leaf in reversed([*enumerate(arguments)]) if _has_identity(leaf)}
    outputs = {id(leaf): index for index, leaf in reversed([*enumerate(outer or parts)]) if isinstance(leaf, Tensor)}

    def described(index: int, leaf: Any) -> Leaf:
        if id(leaf) in places:
            return ArgumentLeaf(places[id(leaf)])
        if not isinstance(leaf, Tensor):
            return ConstantLeaf(leaf)
        same = outputs.get(id(leaf))
        return HiddenLeaf(
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            requires_grad=leaf.requires_grad,
            same_as=None if not outer and same == index else same,
        )

    return Structure(leaves=tuple(described(*each) for each in enumerate(parts)), spec=spec)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, ShardTensor) or isinstance(other, ShardTensor):
        return False
    return storage_key(one) == storage_key(other)


def _has_identity(leaf: Any) -> bool:
    return not isinstance(leaf, (bool, int, float, complex, str, bytes, type(None), type))
