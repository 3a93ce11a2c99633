"""Views of a gathered whole: what is written to them is written to the shard too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import Self

# Writes the whole to its shard, for the operation of this name.
WriteBack = Callable[[Tensor, str], None]


class Window(torch.Tensor):
    """A view of the whole of a shard, such as ``x[:, 0]`` along the dim that is cut.

    A plain tensor, but that after an operation in place the shard is written to as well.
    """

    __slots__ = ("_whole", "_write_back")

    _whole: Tensor
    _write_back: WriteBack

    @classmethod
    def on(cls, view: Tensor, whole: Tensor, write_back: WriteBack) -> Self:
        """Makes a window of a view.

        Args:
            view: A view of ``whole``.
            whole: The gathered shard.
            write_back: Called after something was written to it.
        """
        # No operation of the user: modes that record need not see it.
        with torch._C.DisableTorchFunction():
            window = view.as_subclass(cls)
        window._whole, window._write_back = whole, write_back
        return window

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        windows = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Window)]
        versions = [window._whole._version for window in windows]
        args, kwargs = pytree.tree_map_only(Window, Window.plain, arguments)
        result = func(*args, **kwargs)
        for window, version in zip(windows, versions, strict=True):
            if window._whole._version != version:
                window._write_back(window._whole, getattr(func, "__name__", str(func)))
            result = windows_of(result, window._whole, window._write_back)
        return result

    def plain(self) -> Tensor:
        """Returns the view without the link to its shard."""
        with torch._C.DisableTorchFunction():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain().__deepcopy__(memo)


def windows_of(result: Any, whole: Tensor, write_back: WriteBack) -> Any:
    """Returns a result with every view of a whole in it as a window.

    Args:
        result: A tensor or several; anything else stays.
        whole: A gathered shard.
        write_back: See `Window.on`.
    """
    if isinstance(result, Tensor):
        return Window.on(result, whole, write_back) if result._base is whole else result
    if type(result) in (tuple, list):
        return type(result)(windows_of(each, whole, write_back) for each in result)
    return result
