"""Tensors without memory: what depends on hidden values is hidden, what is small and known is computed.

The batch, masks and positions keep their values, as in the run that plans are made from, so that a step takes the way
that it takes in training. Everything else has a shape only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
# Results up to this size are computed where all that they depend on is known.
_MOST_KNOWN_BYTES = 16 * 2**20
# These promise no values, so nobody can depend on them.
_WITHOUT_VALUES = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)
_SEND, _RECEIVE = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default


class FakeMemory(TorchDispatchMode):
    """Inside ``with``, tensors that depend on no values, and large ones, are FakeTensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Computes the result, or what it looks like."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            # Somebody else asks what results look like, as DTensors do.
            return func(*args, **kwargs)
        if func.namespace == "aten" and args and isinstance(args[0], FakeTensor):
            return self.fake.__torch_dispatch__(func, types, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is _RECEIVE and is_vote(func, args):
            result = func(*args, **kwargs)
            tensors[0].fill_(1)
            return result
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # What FakeTensors come to themselves, after they have looked at all arguments once more.
            return self.fake.__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket in _WITHOUT_VALUES and kwargs.get("device") != _META:
            return self._hidden(func, args, kwargs)
        if kwargs.get("device") == _META or any(tensor.is_meta for tensor in tensors) or func.namespace != "aten":
            return func(*args, **kwargs)
        if func.is_view or (tensors and func._schema.is_mutable):
            return func(*args, **kwargs)
        try:
            shown = self._hidden(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)
        size = sum(leaf.nbytes for leaf in pytree.tree_leaves(shown) if isinstance(leaf, Tensor))
        return shown if size > _MOST_KNOWN_BYTES else func(*args, **kwargs)

    def _hidden(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.fake:
            return func(*args, **kwargs)


def is_vote(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operation is a vote: stages ask each other whether all of them know their shapes (they do).

    Args:
        func: The operation.
        args: Its arguments.
    """
    if func is not _SEND and func is not _RECEIVE:
        return False
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return len(tensors) == 1 and tensors[0].dtype == torch.int32 and tensors[0].numel() == 1
