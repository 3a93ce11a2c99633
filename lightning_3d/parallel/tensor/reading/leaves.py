"""Reading parameters: at rest the parameter itself, while a step runs the tensor that operations can use.

Operations on a DTensor cost hundreds of microseconds each. So a step reads an alias instead, a plain leaf on the memory
of the DTensor's local part, whose gradients are handed over to the parameter as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import Self

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.tensor.reading.aliases import alias_properties
from lightning_3d.shards import executor
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.partial import PartialTensor

_SLOTS = "_mesh_3d_slots"
Hook = Callable[[Tensor], Tensor | None]
# A class, the parameters that it gets properties for, and the other attributes.
ClassKey = tuple[type, tuple[str, ...], tuple[str, ...]]


class Activity:
    """Whether a step of a module runs: forward and backward, since checkpoints compute again in backward.

    A context manager, which may be entered inside itself. What the user has compiled runs as it is inside: Dynamo would
    break its graph at every operation on shards.

    Args:
        group: Forgets what one step remembers when it ends.
    """

    __slots__ = ("_eager", "_group", "depth")

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._eager: AbstractContextManager[None] = nullcontext()
        self.depth = 0

    def __enter__(self) -> Self:
        if not self.depth:
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        self.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if not self.depth:
            self._eager.__exit__(kind, error, trace)
            self._group.forget_copies()

    def __bool__(self) -> bool:
        return self.depth > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a step reads a parameter.

    Attributes:
        layout: How it is cut; None if every rank has the whole.
        partial: Its gradients stay partial until all of them are summed; for whole ones only.
        hooks: What the user had registered on its gradient.
    """

    layout: Layout | None = None
    partial: bool = False
    hooks: tuple[Hook, ...] = ()

    @property
    def placement(self) -> Placement:
        """What torch calls it."""
        return Replicate() if self.layout is None else Shard(self.layout.dim)


class PartialSum:
    """How far the sum over the ranks of one parameter's partial gradients is.

    Args:
        ranks: Number of summands.

    Attributes:
        resting: What the optimizer holds; its gradient is summed.
        complete: Whether the gradient is the sum.
    """

    __slots__ = ("_ranks", "complete", "resting")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.resting: nn.Parameter | None = None
        self.complete = False

    def local_gradient(self) -> Tensor | None:
        """Returns this rank's part of the gradient that the optimizer will see."""
        gradient = None if self.resting is None else self.resting.grad
        return gradient._local_tensor if isinstance(gradient, DTensor) else gradient

    def reopen(self) -> None:
        """Makes a sum that was not zeroed a summand again, since the next sum includes it."""
        gradient = self.local_gradient() if self.complete else None
        self.complete = False
        if gradient is not None:
            gradient.div_(self._ranks)


class Slot:
    """What stands under all names of one parameter.

    Args:
        reading: How a step reads it.
        group: The ranks that it is cut over.
    """

    __slots__ = ("group", "leaf", "partial_sum", "reading")

    def __init__(self, reading: Reading, group: ShardGroup) -> None:
        self.reading = reading
        self.group = group
        self.leaf: Leaf | None = None
        self.partial_sum = PartialSum(group.size) if reading.partial else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        """A copy of the module has parameters of its own."""
        return Slot(self.reading, self.group)

    def current(self, parameter: nn.Parameter) -> Leaf | None:
        """Returns the leaf of the parameter that is registered now; None if it must be read as it is."""
        leaf = self.leaf
        return leaf if leaf is not None and leaf.serves(parameter) else self.renewed(parameter)

    def renewed(self, parameter: nn.Parameter) -> Leaf | None:
        """Returns a leaf of a parameter that the last one does not serve."""
        if not isinstance(parameter, DTensor) or parameter.placements != (self.reading.placement,):
            return None
        self.leaf = Leaf(parameter, self)
        return self.leaf


class Leaf:
    """A plain leaf on the memory of a parameter's local part, and what reading the parameter gives.

    FSDP2 frees that memory and fetches it again, in place.

    Args:
        parameter: A DTensor on the tensor axis alone.
        slot: Its place.
    """

    __slots__ = ("local", "parameter", "shown", "tensor")

    def __init__(self, parameter: Any, slot: Slot) -> None:
        self.parameter = parameter
        self.local: Tensor = parameter._local_tensor
        self.tensor = _without_padding(self.local.detach(), slot).requires_grad_()
        # Without a way back to the leaf: the collector does not see through hooks.
        self.tensor.register_post_accumulate_grad_hook(_Delivery(parameter, slot))
        self.tensor.requires_grad_(parameter.requires_grad)
        self.shown = _shown(self.tensor, slot)

    def serves(self, parameter: Any) -> bool:
        """Whether this is a leaf of the parameter as it is now; it trains as the parameter does."""
        if self.parameter is not parameter or self.local is not parameter._local_tensor:
            return False
        if self.tensor.requires_grad is not parameter.requires_grad:
            self.tensor.requires_grad_(parameter.requires_grad)
        return True


class _Delivery:
    """Moves a gradient that has arrived at a leaf to the parameter: who takes it from there frees its memory."""

    __slots__ = ("_group", "_parameter", "_partial_sum", "_plain", "_reading", "_spec")

    def __init__(self, parameter: Any, slot: Slot) -> None:
        self._parameter = parameter
        self._spec = parameter._spec
        self._reading = slot.reading
        self._group = slot.group
        self._partial_sum = slot.partial_sum
        padding = self._reading.layout is not None and not self._reading.layout.fits(self._group.size)
        self._plain = not (self._reading.hooks or padding or self._partial_sum)

    def __call__(self, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        parameter = self._parameter
        assert gradient is not None
        late, told = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        # Called for each parameter in each backward, so the usual case is kept short.
        if self._plain and not late and not told and parameter.grad is None:
            # Not by a call of the class, whose empty __init__ costs twice as much as the rest.
            parameter.grad = DTensor.__new__(DTensor, gradient, self._spec, requires_grad=False)
            return
        with torch.no_grad():
            self._deliver(gradient, late or {}, told or {})

    def _deliver(self, gradient: Tensor, late: Mapping[Any, Hook], told: Mapping[Any, Callable[[Any], None]]) -> None:
        parameter, layout = self._parameter, self._reading.layout
        if self._partial_sum is not None and (late or told):
            _refuse_late_hooks(parameter.shape)
        for hook in (*self._reading.hooks, *late.values()):
            gradient = _hooked(gradient, hook, layout, self._group)
        if layout is not None:
            gradient = layout.padded(gradient, self._group.size)
        if self._partial_sum is not None:
            self._partial_sum.reopen()
        if parameter.grad is None:
            parameter.grad = DTensor(gradient, self._spec, requires_grad=False)
        else:
            parameter.grad._local_tensor.add_(gradient)
        for tell in told.values():
            tell(parameter)


def _without_padding(local: Tensor, slot: Slot) -> Tensor:
    layout, group = slot.reading.layout, slot.group
    return local if layout is None else layout.without_padding(local, group.rank, group.size)


def _shown(leaf: Tensor, slot: Slot) -> Tensor:
    layout, group = slot.reading.layout, slot.group
    if layout is not None:
        return executor.Shard(leaf, layout.dim, layout.segments, group)
    return PartialTensor(leaf, group) if slot.reading.partial else leaf


def _refuse_late_hooks(shape: torch.Size) -> None:
    raise ModuleError(
        f"a hook was set on the gradient of a parameter of shape {tuple(shape)}, which the tensor-parallel ranks sum "
        "only after the last backward.",
        fix="set it in __init__ or configure_model, or use on_before_optimizer_step",
    )


def _hooked(gradient: Tensor, hook: Hook, layout: Layout | None, group: ShardGroup) -> Tensor:
    """What a user's hook makes of a gradient, which it sees as a whole."""
    if layout is None:
        changed = hook(gradient)
        return gradient if changed is None else changed
    shard = executor.Shard(gradient, layout.dim, layout.segments, group)
    changed = hook(shard)
    return gradient if changed is None else shard.part_of(changed)


def read_leaf(module: nn.Module, name: str) -> Tensor:
    """Returns the plain local tensor that a step computes with, whatever reading the parameter shows.

    Args:
        module: The module that owns it.
        name: Its name there.
    """
    parameter = module._parameters[name]
    slot = slots_of(module).get(name)
    assert parameter is not None
    leaf = None if slot is None else slot.current(parameter)
    return parameter if leaf is None else leaf.tensor


def slots_of(module: nn.Module) -> dict[str, Slot]:
    """Returns the slots of a module's own parameters by their names."""
    slots: dict[str, Slot] = module.__dict__.get(_SLOTS, {})
    return slots


def swap_class(
    module: nn.Module, slots: dict[str, Slot], aliases: dict[str, Any], activity: Activity, known: dict[ClassKey, type]
) -> None:
    """Gives a module's class a property for each of its parameters, and for attributes that hold some.

    Args:
        module: The module; its own class is left alone.
        slots: Slot of each parameter, by its name in the module.
        aliases: Attributes that hold parameters, with places instead of them.
        activity: Says when leaves are read.
        known: Classes made so far, for modules of one class to keep one class.
    """
    cls = type(module)
    # Where a class has a property of its own under the name, users read that.
    names = tuple(name for name in module._parameters if not isinstance(getattr(cls, name, None), property))
    module.__dict__[_SLOTS] = slots
    followed = alias_properties(module, aliases)
    key = (cls, names, tuple(followed))
    if key not in known:
        properties = {name: _property(name, activity) for name in names} | followed
        own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        known[key] = type(cls.__name__, (cls,), {**own, **properties})
    module.__class__ = known[key]


def _property(name: str, activity: Activity) -> property:
    def read(self: nn.Module) -> Any:
        try:
            parameter = self._parameters[name]
        except KeyError:
            return _attribute(self, name)
        if not activity.depth or parameter is None:
            return parameter
        slot: Slot | None = self.__dict__[_SLOTS].get(name)
        if slot is None:
            return parameter
        leaf = slot.leaf
        if leaf is None or not leaf.serves(parameter):
            leaf = slot.renewed(parameter)
        return parameter if leaf is None else leaf.shown

    def write(self: nn.Module, value: Any) -> None:
        # Parameters are taken by nn.Module before this is asked.
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        del self.__dict__[name]

    return property(read, write, delete)


def _attribute(module: nn.Module, name: str) -> Any:
    """What a plain attribute is, where the parameter of this name was taken away."""
    try:
        return module.__dict__[name]
    except KeyError:
        # nn.Module's own search comes next.
        raise AttributeError(name) from None
