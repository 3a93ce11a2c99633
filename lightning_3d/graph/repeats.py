"""Which blocks repeat another one, and what a call of one that does returns."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lightning_3d.graph.blocks import Stack

_PLAIN = (bool, int, str, type(None))
_TABLES = ("_parameters", "_buffers", "_modules")


class Repeatable(Tensor):
    """A tensor that an observer puts in the place of another, in all blocks alike."""

    __slots__ = ()

    @abstractmethod
    def looks(self) -> object:
        """Returns what calls must have in common beside its shape, dtype and need of a gradient."""

    @abstractmethod
    def again(self) -> Tensor:
        """Returns another one that looks like it, with a history."""


def block_kinds(module: nn.Module, stacks: Sequence[Stack]) -> dict[str, object]:
    """Returns a key for each block; blocks with equal keys do the same.

    A key holds classes, shapes and plain attributes of all that is in the block. Numbers that count the blocks of a
    stack, as Hugging Face's ``layer_idx`` does, are left out; of other rates than 0 only that they are not 0 counts.

    Args:
        module: The whole module.
        stacks: Its stacks.
    """
    kinds: dict[str, object] = {}
    for stack in stacks:
        facts = [_facts(module.get_submodule(name)) for name in stack.blocks]
        counting = {place for place in facts[0] if _counts([each.get(place) for each in facts])}
        for name, each in zip(stack.blocks, facts, strict=True):
            kinds[name] = frozenset((place, fact) for place, fact in each.items() if place not in counting)
    return kinds


def _counts(values: list[Any]) -> bool:
    first = values[0]
    return all(type(value) is int and value == first + index for index, value in enumerate(values))


def _facts(block: nn.Module) -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for path, child in block.named_modules():
        found[path, "class"] = type(child)
        for key, value in (*child._parameters.items(), *child._buffers.items()):
            found[path, key] = None if value is None else (tuple(value.shape), value.dtype, value.requires_grad)
        for key, value in vars(child).items():
            if key in _TABLES:
                continue
            found[path, key] = _fact(value)
            if "_hooks" in key and value:
                # Nobody knows what a hook does; each block runs its own.
                found[path, key] = id(child)
    return found


def _fact(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value != 0
    if isinstance(value, (tuple, list)):
        return tuple(_fact(each) for each in value)
    return getattr(value, "__qualname__", type(value))


class Attributes:
    """The tensors in the attributes of a block and of what is in it: a step may read what a call leaves there.

    Args:
        block: Before its call.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._before = _held(block)

    def left(self) -> dict[tuple[str, str], Any] | None:
        """Returns what holds other tensors since then; None if a collection was filled that others may hold too."""
        changed: dict[tuple[str, str], Any] = {}
        for place, (value, tensors) in _held(self._block).items():
            old, known = self._before.get(place, (None, []))
            if len(known) == len(tensors) and all(map(operator.is_, known, tensors)):
                continue
            if old is value:
                return None
            changed[place] = value
        return changed


def _held(block: nn.Module) -> dict[tuple[str, str], tuple[Any, list[Tensor]]]:
    found = {}
    for path, child in block.named_modules():
        for key, value in vars(child).items():
            if key not in _TABLES:
                tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                found[path, key] = (value, tensors)
    return found


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Returns what two calls have in common whose results look alike; None if a call is like no other."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if not all(map(_can_repeat, leaves)):
        return None
    described = tuple(_described(leaf) for leaf in leaves)
    casts = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return (str(structure), described, torch.is_grad_enabled(), casts)


def _can_repeat(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or isinstance(leaf, Repeatable) or is_plain(leaf)


def _described(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        looks = leaf.looks() if isinstance(leaf, Repeatable) else None
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, looks)
    return leaf if isinstance(leaf, (*_PLAIN, float)) else type(leaf)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is torch's own, with or without values."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


class Repeat:
    """How a call of a block looked, for the blocks that repeat it.

    Args:
        block: Name of the block.
        arguments: What it was called with.
        output: What it returned.
        left: What it left in attributes, by path and name.
    """

    def __init__(self, block: str, arguments: Any, output: Any, left: dict[tuple[str, str], Any]) -> None:
        self.block = block
        self._inputs = {id(leaf): index for index, leaf in enumerate(pytree.tree_leaves(arguments))}
        self._leaves, self._structure = pytree.tree_flatten((output, [*left.values()]))
        self._places = tuple(left)
        self.usable = all(map(_can_repeat, self._leaves))

    def again(self, block: nn.Module, arguments: Any) -> Any:
        """Returns what the same call with other arguments returns: new tensors, and those that are passed through.

        Args:
            block: Gets the same attributes as the first one.
            arguments: Of this call.
        """
        inputs = pytree.tree_leaves(arguments)
        made = {key: inputs[index] for key, index in self._inputs.items()}
        for leaf in self._leaves:
            if id(leaf) not in made:
                made[id(leaf)] = alike(leaf)
        output, left = pytree.tree_unflatten([made[id(leaf)] for leaf in self._leaves], self._structure)
        for (path, key), value in zip(self._places, left, strict=True):
            vars(block.get_submodule(path))[key] = value
        return output


def alike(leaf: Any) -> Any:
    """Returns another tensor that looks like this one, with a history; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Repeatable):
        return leaf.again()
    new = torch.empty_like(leaf).requires_grad_(leaf.requires_grad)
    # No leaf: a step may write to a block's output in place.
    return new.clone()
