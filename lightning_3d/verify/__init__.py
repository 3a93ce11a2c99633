"""``lightning-3d verify``: a module of anybody's on one device and on a mesh, and a certificate of what is equal.

``processes`` starts ranks, ``job`` is what each of them does, ``comparison`` holds two records against each other,
``search`` looks for the place of a difference, ``certificate`` prints. In Python: ``lightning_3d.verify(...)``.
"""

from __future__ import annotations

import importlib
import sys
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from lightning_3d.verify.command import run

if TYPE_CHECKING:
    from lightning_3d.verify.certificate import Certificate
    from lightning_3d.verify.verifier import verify

__all__ = ["Certificate", "run", "verify"]

if not TYPE_CHECKING:
    # They need torch, and a misspelt option should not wait for that.
    _LAZY = MappingProxyType({"Certificate": "certificate", "verify": "verifier"})

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Callable(ModuleType):
    """A package that is called as its function is: ``lightning_3d.verify`` is the name of both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Certificate:
        function: Any = importlib.import_module(f"{__name__}.verifier").verify
        certificate: Certificate = function(*args, **kwargs)
        return certificate


sys.modules[__name__].__class__ = _Callable
