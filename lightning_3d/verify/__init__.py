"""``lightning-3d verify``: a module of anybody's on one device and on a mesh, and a certificate of what is equal.

``processes`` starts ranks, ``job`` is what each of them does, ``comparison`` holds two records against each other,
``search`` looks for the place of a difference, ``certificate`` prints. In Python: ``lightning_3d.verify.verify(...)``.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

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
