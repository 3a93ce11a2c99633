"""Loaders of which planning took a batch, for the run that then uses them."""

from __future__ import annotations

from typing import Any


class BegunLoaders:
    """Loaders of which a batch was taken that cannot begin anew, until the run uses them."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Any, Any]] = {}

    def keep(self, given: Any, begun: Any) -> None:
        """Remembers what begins with the batch that was taken out of a loader."""
        self._begun[id(given)] = (given, begun)

    def take(self, given: Any) -> Any:
        """Returns the loader to use in place of ``given``: one that begins with the batch that was taken out of it."""
        _, begun = self._begun.pop(id(given), (None, given))
        return begun
