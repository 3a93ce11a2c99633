"""Doing something around the calls of a module and of its methods, without wrapping it and without its hooks.

The class of the module is swapped for a subclass whose ``__call__`` hands over to a handler. Parameters, hooks and
``forward`` stay as they are; the handler stands outside all hooks, those of FSDP2 included. Other methods are shadowed
by an attribute of the instance, which leaves the user's class alone; ``forward`` too, inside all hooks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

# Whatever the library keeps in a module is called so.
OURS = "_mesh_3d_"
_HANDLER = f"{OURS}call_handler"
_FORWARD_HANDLER = f"{OURS}forward_handler"
_FORWARD = "forward"
# What had been in the place of attributes that are shadowed.
_SHADOWED = f"{OURS}shadowed"
_NOTHING = object()


@dataclass(slots=True)
class Call:
    """A call that a handler was handed: it makes it as it is by calling it, or with other arguments.

    Attributes:
        function: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Makes the call as it is."""
        return self.function(*self.args, **self.kwargs)


Handler = Callable[[Call], Any]


def around_calls(module: nn.Module, handler: Handler) -> None:
    """Makes every call of ``module`` go through ``handler(call)``, which returns ``call()``'s result.

    A second handler of the same module replaces the first, so that a module may be set up again.
    """
    module.__dict__[_HANDLER] = handler
    cls = type(module)
    if any(_HANDLER in base.__dict__ for base in cls.__mro__):
        return
    names = {"__call__": _call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, _HANDLER: None}
    module.__class__ = type(cls.__name__, (cls,), names)


def around_forward(module: nn.Module, handler: Handler) -> None:
    """Makes ``forward`` of ``module`` go through ``handler(call)``, inside all hooks of its calls.

    A second handler of the same module replaces the first.
    """
    attributes = module.__dict__
    if _FORWARD_HANDLER not in attributes:
        own = attributes.get(_FORWARD)
        attributes.setdefault(_SHADOWED, _Shadowed())[_FORWARD] = _NOTHING if own is None else own

        @functools.wraps(type(module).forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = MethodType(type(self).forward, self) if own is None else own
            handler: Handler | None = self.__dict__.get(_FORWARD_HANDLER)
            return inner(*args, **kwargs) if handler is None else handler(Call(inner, args, kwargs))

        # Bound to the module, so that a copy of it calls its own.
        attributes[_FORWARD] = MethodType(forward, module)
    attributes[_FORWARD_HANDLER] = handler


def forward_is_handled(module: nn.Module) -> bool:
    """Returns whether ``forward`` of ``module`` has a handler."""
    return module.__dict__.get(_FORWARD_HANDLER) is not None


def plain_calls(module: nn.Module) -> None:
    """Takes the handlers of ``module`` away; calls are what they were before."""
    module.__dict__.pop(_HANDLER, None)
    if _FORWARD_HANDLER in module.__dict__:
        module.__dict__[_FORWARD_HANDLER] = None


class _Shadowed(dict[str, Any]):
    """What shadows hide: copied with its owner, and pickled as nothing, since it holds methods of this process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shadowed:
        memo[id(_NOTHING)] = _NOTHING
        return _Shadowed((name, copy.deepcopy(value, memo)) for name, value in self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shadowed, ()


def shadow(owner: object, name: str, method: Any) -> Callable[[], None]:
    """Has ``owner.<name>`` be ``method``, or another value; returns what puts back the one before."""
    attributes = owner.__dict__
    before = attributes.get(name, _NOTHING)
    shadowed = attributes.setdefault(_SHADOWED, _Shadowed()) if isinstance(owner, nn.Module) else {}
    is_first = name not in shadowed
    shadowed.setdefault(name, before)
    attributes[name] = method

    def put_back() -> None:
        if is_first:
            shadowed.pop(name, None)
        if before is _NOTHING:
            del attributes[name]
        else:
            attributes[name] = before

    return put_back


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module as they are without handlers, shadows and what else the library keeps."""
    attributes = vars(module)
    own = {name: value for name, value in attributes.items() if not name.startswith(OURS)}
    for name, value in attributes.get(_SHADOWED, {}).items():
        own[name] = value
    return {name: value for name, value in own.items() if value is not _NOTHING}


# A caller may be compiled, and would compile the handlers.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    owner: Any = next(base for base in type(self).__mro__ if _HANDLER in base.__dict__)
    call = super(owner, self).__call__
    handler: Handler | None = self.__dict__.get(_HANDLER)
    if handler is None:
        return call(*args, **kwargs)
    return handler(Call(call, args, kwargs))
