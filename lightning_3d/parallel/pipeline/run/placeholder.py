"""Placeholders: what stands on a stage for the hidden values that earlier stages compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.graph.fake_run import is_attribute
from lightning_3d.parallel.pipeline.record.hidden import Function, leaves, mapped
from lightning_3d.parallel.pipeline.record.step import Origin
from lightning_3d.shards.absent import form_of
from lightning_3d.shards.foreign import check_not_handed_over
from lightning_3d.shards.tensor import ShardTensor

_PRINTS = frozenset({"__repr__", "__str__", "__format__"})
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_SIZES = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "get_device", "element_size"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_tensor", "is_inference"}
    | {"__len__", "is_shared", "has_names", "result_type"}
)


_PLAIN = "functions of torch instead, or checkpoint(..., use_reentrant=False) if it is torch's own"


class StageExit(BaseException):
    """Ends the user's step on a stage that has done its part.

    No `Exception`, so that a step's own ``except`` does not swallow it.
    """


class Placeholder(Tensor):
    """Zeros in the place of a hidden value, until the stage begins and the value is received.

    Everything about it but its values is true: shape, dtype, device, ``requires_grad``. When the value comes, the
    object itself becomes a plain tensor with its values and its way back for gradients, wherever the user keeps it.
    Shards cannot be made so: functions of torch are given them instead.

    Attributes:
        plain: The zeros.
        origin: Who makes the value; None if nobody is known.
        bound: The shard that was received.
        again: Makes the value from others, for what is no value of its own.
    """

    plain: Tensor
    origin: Origin | None
    bound: Tensor | None
    again: Callable[[], Tensor | None] | None
    _wants_gradient: bool

    @classmethod
    def of(
        cls,
        plain: Tensor,
        origin: Origin | None = None,
        *,
        requires_grad: bool = False,
        again: Callable[[], Tensor | None] | None = None,
    ) -> Placeholder:
        """Returns a placeholder that shows a plain tensor."""
        # In a dry run torch makes no other tensor of a fake one; what it shows is asked of the plain one anyway.
        made = Tensor._make_subclass(cls, form_of(plain) if isinstance(plain, FakeTensor) else plain)
        made.plain, made.origin, made.bound, made.again = plain, origin, None, again
        made._wants_gradient = requires_grad
        return made

    def receive(self, value: Tensor) -> Tensor:
        """Puts a value in its place; returns what stands for it from now on, the object itself if that can be."""
        if isinstance(value, ShardTensor):
            self.bound = value
            return value
        with torch._C.DisableTorchFunctionSubclass():
            for attribute in ("plain", "origin", "bound", "again", "_wants_gradient"):
                delattr(self, attribute)
            self._become(torch.empty_like(value))
            # A copy: code may write to it, and torch uses the memory of what was received again. It does not count as
            # a change, for a checkpoint may have saved the object as it was.
            with _unsafe_preserve_version_counter(self):
                return self.copy_(value)

    def _become(self, memory: Tensor) -> None:
        if isinstance(memory, FakeTensor):
            # In a dry run; what makes it fake is in its class and attributes too.
            torch._C._swap_tensor_impl(self, memory)
            self.__class__ = FakeTensor  # type: ignore[assignment]
            vars(self).update(vars(memory))
            return
        self.data = memory
        self.__class__ = Tensor  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        """A copy stands for the same value."""
        return self

    def __hash__(self) -> int:
        return id(self)

    @property
    def requires_grad(self) -> bool:
        """Whether the value needs a gradient."""
        return self._wants_gradient if self.bound is None else self.bound.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self._wants_gradient = wanted

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Where functions arrive that no run watches: inside modules, and after the step."""
        kwargs = kwargs or {}
        if tells_about(func):
            return about(func, args, kwargs)
        args, kwargs = values_of((args, kwargs), func)
        return func(*args, **kwargs)


# Asked of each function that a step calls, and of each property that it reads.
@lru_cache(maxsize=1024)
def tells_about(function: Function) -> bool:
    """Returns whether a function tells about a tensor without its values."""
    name = getattr(function, "__name__", "")
    if is_attribute(function):
        return True
    return name in _SIZES or name in _PRINTS or name in _HOOKS or name in ("requires_grad_", "retain_grad")


def about(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function tells about a placeholder; a bound one is what it is bound to."""
    # Asked often, and mostly of the batch.
    if not kwargs and not any(isinstance(value, Placeholder) for value in args):
        return function(*args)
    name = getattr(function, "__name__", "")
    first = args[0] if args else None
    if isinstance(first, Placeholder) and first.bound is None:
        if name in _PRINTS:
            return f"Placeholder({first.origin}, {list(first.plain.shape)})"
        if name in _HOOKS:
            return RemovableHandle(OrderedDict())
        if name in ("requires_grad_", "retain_grad"):
            return first if name == "requires_grad_" else None
    known = replaced((args, kwargs), lambda leaf: _known(leaf) if isinstance(leaf, Placeholder) else leaf)
    return function(*known[0], **known[1])


def values_of(tree: Any, user: object) -> Any:
    """Returns nested arguments with received shards in the place of placeholders.

    Args:
        tree: Tuples, lists and dicts; lists and dicts are changed in place, for they may be the user's own.
        user: The function or the name of the module that uses them, for the error.

    Raises:
        ModuleError: One was not received.
    """

    def value(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Placeholder):
            return leaf
        if leaf.bound is not None and not torch.is_grad_enabled():
            check_not_handed_over([leaf], "a hidden state of an earlier pipeline stage", _PLAIN)
        return refuse(leaf, user) if leaf.bound is None else leaf.bound

    return replaced(tree, value)


def refuse(placeholder: Placeholder, user: object) -> NoReturn:
    """Refuses a use of a value that this stage does not have."""
    name = user if isinstance(user, str) else getattr(user, "__name__", str(user))
    made = "a value that nobody is known to have made" if placeholder.origin is None else str(placeholder.origin)
    raise ModuleError(
        f"{name} at {user_line()} uses {made}, which an earlier pipeline stage computes and which was not sent: when "
        "the step was recorded it was not used there.",
        fix="take the same branches for every batch of a kind (not by batch_idx or global_step), and hand values on as "
        "tensors, by the arguments and results of modules",
    )


def resolve(tree: Any) -> Any:
    """Returns nested containers with received shards in the place of placeholders that have got one."""

    def value(leaf: Any) -> Any:
        return leaf.bound if isinstance(leaf, Placeholder) and leaf.bound is not None else leaf

    return mapped(value, tree)


def made_again(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Tensor | None]:
    """Returns what makes a value from received ones, and None until they are.

    What was given back as it is may be another tensor for real values, or the same: that is found when it is used.
    """

    def value() -> Tensor | None:
        if any(isinstance(leaf, Placeholder) and leaf.bound is None for leaf in leaves((args, kwargs))):
            return None
        known_args, known_kwargs = resolve((args, kwargs))
        result: Tensor = function(*known_args, **known_kwargs)
        return result

    return value


def replaced(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns nested arguments with other tensors in them.

    Args:
        tree: Tuples, lists and dicts. Lists and dicts are changed in place, tuples made again only if need be.
        change: Returns what stands for a tensor; itself if nothing does.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        parts = [replaced(part, change) for part in tree]
        if all(map(is_, parts, tree)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, list):
        for index, part in enumerate(tree):
            new = replaced(part, change)
            if new is not part:
                tree[index] = new
    elif isinstance(tree, dict):
        for key, part in list(tree.items()):
            new = replaced(part, change)
            if new is not part:
                tree[key] = new
    return tree


def _known(placeholder: Placeholder) -> Tensor:
    return placeholder.plain if placeholder.bound is None else placeholder.bound
