"""How a rule is written down: under every function that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Function)

# As numpy has them.
_OTHER_NAMES: Mapping[str, str] = {"axis": "dim", "keepdims": "keepdim"}


class RuleTable:
    """The rules of one kind of operation, by function object.

    A rule has the signature of its operation. It is called with at least one shard among its arguments, and returns
    shards or replicated tensors, or raises `Unshardable`.
    """

    def __init__(self) -> None:
        self._rules: dict[Function, Function] = {}

    def rule(self, *functions: Function) -> Callable[[_Rule], _Rule]:
        """Returns a decorator that writes a rule down under these functions."""

        def write_down(rule: _Rule) -> _Rule:
            for function in functions:
                self.add(function, rule)
            return rule

        return write_down

    def add(self, function: Function, rule: Function) -> None:
        """Writes a rule down under one more function."""
        assert function not in self._rules, f"two rules for {function}"
        self._rules[function] = rule

    def items(self) -> Iterator[tuple[Function, Function]]:
        """Returns pairs of function and rule."""
        return iter(self._rules.items())


def called(rule: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns what a rule makes of arguments, also under the names that torch knows besides the rule's own."""
    if args and _OTHER_NAMES.keys().isdisjoint(kwargs):
        return rule(*args, **kwargs)
    named = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in named:
        args = (named.pop("input"),)
    return rule(*args, **named)


def spellings(name: str) -> tuple[Function, ...]:
    """Returns every function of torch with this name: ``torch.x``, ``Tensor.x``, ``torch.nn.functional.x``."""
    found = (getattr(place, name, None) for place in (torch, Tensor, F))
    return tuple(dict.fromkeys(function for function in found if callable(function)))
