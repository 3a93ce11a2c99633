"""Seeing what a block asks of torch: the plain calls below the rules of the shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor

_NO_ARGUMENTS: Mapping[str, Any] = {}


class PlainCalls(TorchFunctionMode):
    """A mode that sees calls on plain tensors only.

    A call with shards runs their rule under the mode, so that what arrives here is what the rule does with the local
    parts. A node of the shards (`lightning_3d.shards.nodes`) is one call; nobody looks inside.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if issubclass(kind, (ShardTensor, PartialTensor)):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        return self.plain(func, args, kwargs or _NO_ARGUMENTS)

    @abstractmethod
    def plain(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what ``function`` makes of plain arguments; the mode is off meanwhile."""
