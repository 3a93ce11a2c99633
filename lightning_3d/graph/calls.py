"""Doing something around the calls of a module and of its methods, without wrapping it and without its hooks.

The class of the module is swapped for a subclass whose ``__call__`` hands over to a handler. Parameters, hooks and
``forward`` stay as they are; the handler stands outside all hooks, those of FSDP2 included. Other methods are shadowed
by an attribute of the instance, which leaves the user's class alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Handler = Callable[[Callable[[], Any]], Any]
_HANDLER = "_mesh_3d_call_handler"


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


def plain_calls(module: nn.Module) -> None:
    """Takes the handler of ``module`` away; calls are what they were before."""
    module.__dict__.pop(_HANDLER, None)


def shadow(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Has ``module.<name>`` be ``method``; returns what puts back the one before."""
    attributes = module.__dict__
    before = attributes.get(name)
    attributes[name] = method

    def put_back() -> None:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before

    return put_back


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    owner: Any = next(base for base in type(self).__mro__ if _HANDLER in base.__dict__)
    call = super(owner, self).__call__
    handler: Handler | None = self.__dict__.get(_HANDLER)
    if handler is None:
        return call(*args, **kwargs)
    return handler(lambda: call(*args, **kwargs))
