"""Which parts of a module its author has compiled with ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lightning_3d.graph.parameters import class_name

# What torch.compile leaves on a function that it returns.
_COMPILED = "_torchdynamo_orig_callable"
# Attributes for a call of the whole: torch.compile(module), and module.compile().
_CALLS = ("forward", "_compiled_call_impl")


def compiled_parts(module: nn.Module) -> tuple[str, ...]:
    """Returns names of the compiled modules, methods and functions that a module has or its methods name, each once.

    Modules come by their names in the module, methods by their classes. What is compiled elsewhere, as in a function
    that a method calls, is not found.
    """
    found: dict[str, None] = {}
    for name, child in module.named_modules():
        shown = name.replace("._orig_mod", "")
        for key, value in vars(child).items():
            if _is_compiled(value):
                found[f"{shown}.{key}".strip(".") if key not in _CALLS else shown or class_name(child)] = None
    for cls in dict.fromkeys(type(child) for child in module.modules()):
        found |= dict.fromkeys(_in_class(cls))
    return tuple(found)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls of a module itself are compiled."""
    return any(_is_compiled(vars(module).get(key)) for key in _CALLS)


def _in_class(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "lightning", "builtins"):
            continue
        for key, value in vars(base).items():
            if _is_compiled(value):
                yield f"{base.__name__}.{key}"
            elif isinstance(value, FunctionType):
                yield from (name for name in _names(value.__code__) if _is_compiled(value.__globals__.get(name)))


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function reads, the functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_compiled(value: Any) -> bool:
    return isinstance(value, FunctionType) and hasattr(value, _COMPILED)
