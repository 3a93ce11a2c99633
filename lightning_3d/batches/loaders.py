"""Loaders that stand in the place of others."""

from __future__ import annotations

from typing import Any


class LoaderInPlace:
    """Stands in the place of a loader: every attribute is that one's, also where it is set.

    What a class below keeps for itself it keeps in ``vars(self)``.

    Args:
        loader: An iterable of batches.
        own: What is to be kept besides.
    """

    def __init__(self, loader: Any, **own: Any) -> None:
        vars(self).update(_loader=loader, **own)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)
