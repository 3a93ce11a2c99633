"""Hooks on a pipeline: numbers that they make of parameters of other ranks come from those ranks.

All ranks run the same hook, so what one of them lacks another has at the same place of the hook. Whatever is computed
from a parameter is followed on every rank, also on those that have the values; where a number comes out, where one is
read, or where tensors meet that no rank has together, all ranks exchange them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import ModuleError
from lightning_3d.shards.absent import Absent
from lightning_3d.shards.presence import Presence
from lightning_3d.shards.protocol import storage_key, writes_to_first
from lightning_3d.shards.writes import tensors_in

Ranks = frozenset[int]
_Result = TypeVar("_Result")

# What Python reads of a tensor.
_READS = frozenset(
    {
        *("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__", "__contains__"),
        *("tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"),
        *("nonzero", "argwhere", "masked_select", "unique"),
    }
)
# Reads of whole tensors that loggers make on one rank alone.
_READS_OF_ALL = frozenset({"tolist", "numpy", "__array__", "__format__"})
# What may give one element and still be the parameter's own memory.
_VIEWS = frozenset(
    {"__getitem__", "select", "squeeze", "view", "reshape", "view_as", "reshape_as", "unbind", "__get__"}
)

# Where a DTensor keeps which ranks have its values.
_LYING = "_mesh_3d_lying"


class Holders:
    """Which pipeline ranks have the values of a tensor; all of them, unless it comes from a parameter.

    Args:
        module: A module whose absent parameters are `Absent`.
        presence: Which ranks hold its parameters.
    """

    def __init__(self, module: nn.Module, presence: Presence) -> None:
        everywhere = frozenset(range(presence.group.size()))
        self.parameters: tuple[nn.Parameter, ...] = tuple(module.parameters())
        self._ranks: dict[int, Ranks] = {}
        for name, parameter in module.named_parameters():
            ranks = frozenset(presence.holders[name])
            if ranks != everywhere:
                self._ranks[id(parameter)] = ranks
        self._computed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._memory: dict[int, tuple[StorageWeakRef, Ranks]] = {}

    def of(self, tensor: Tensor) -> Ranks | None:
        """Returns the ranks that have the values of a tensor; None if all have."""
        known = self._ranks.get(id(tensor)) or self._noted(tensor)
        if known is None and isinstance(tensor, Absent):
            return tensor._elsewhere.ranks
        if known is None and type(tensor) is nn.Parameter:
            # Made around what was computed, as copies are.
            reference, ranks = self._memory.get(storage_key(tensor), (None, None))
            return None if reference is None or reference.expired() else ranks
        return known

    def is_parameter(self, tensor: object) -> bool:
        """Whether a tensor is a parameter that not all ranks hold."""
        return id(tensor) in self._ranks

    def note(self, tensor: Tensor, ranks: Ranks) -> None:
        """Notes where the values of a tensor are."""
        if id(tensor) in self._ranks:
            return
        if isinstance(tensor, DTensor):
            # Not by a weak reference: ``Module.to`` exchanges DTensors in place, and refuses those that have one.
            vars(tensor)[_LYING] = ranks
            return
        self._computed[tensor] = ranks
        if type(tensor) is Tensor:
            self._memory[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), ranks

    def follow(self, copied: nn.Module, original: nn.Module) -> None:
        """Notes where the parameters of a copy are: where those of its original, a part of the module, are."""
        originals = dict(original.named_parameters(remove_duplicate=False))
        for name, parameter in copied.named_parameters():
            if name in originals:
                self.follow_tensor(parameter, originals[name])

    def follow_tensor(self, copied: Tensor, original: Tensor) -> None:
        """Notes that a tensor is where another one is."""
        ranks = self.of(original)
        if ranks is not None:
            self.note(copied, ranks)

    def _noted(self, tensor: Tensor) -> Ranks | None:
        found: Ranks | None = vars(tensor).get(_LYING) if isinstance(tensor, DTensor) else self._computed.get(tensor)
        return found

    def tidy(self) -> None:
        """Forgets what is gone."""
        self._memory = {at: kept for at, kept in self._memory.items() if not kept[0].expired()}


class Exchange:
    """Brings values from ranks that have them to all. Every call is a collective one.

    Args:
        presence: The ranks.
    """

    def __init__(self, presence: Presence) -> None:
        self._group, self._rank, self._device = presence.group, presence.rank, presence.device
        self._count = 0

    def number(self, value: Tensor, ranks: Ranks, act: str) -> Tensor:
        """Returns a tensor of one real element; where it came from it stays what it is."""
        mine = self._rank == min(ranks)
        own = _whole(value).reshape(()).to(self._device, torch.float64) if mine else 0.0
        number = self._agreed(own, act, value, ranks)
        if mine and not isinstance(value, DTensor):
            return value
        return number.to(value.device, value.dtype).reshape(value.shape)

    def whole(self, value: Tensor, ranks: Ranks, act: str) -> Tensor:
        """Returns a whole tensor, without history."""
        self._agreed(0.0, act, value, ranks)
        source = min(ranks)
        if self._rank == source:
            # Not the tensor itself, to whose graph a collective is a change.
            sent = _whole(value).to(self._device).contiguous().data
        else:
            sent = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        # As bytes, which every backend sends.
        dist.broadcast(sent.view(-1).view(torch.uint8), dist.get_global_rank(self._group, source), group=self._group)
        return sent.to(value.device)

    def any_of(self, here: Sequence[bool]) -> list[bool]:
        """Returns for each place whether any rank says so."""
        found = torch.tensor(here, dtype=torch.int32, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(each) for each in found.tolist()]

    def _agreed(self, own: Tensor | float, act: str, value: Tensor, ranks: Ranks) -> Tensor:
        """Sums a number that one rank has, all of which must be at the same place of the hook."""
        self._count += 1
        place = float(crc32(f"{self._count} {act} {tuple(value.shape)} {value.dtype} {sorted(ranks)}".encode()))
        message = torch.zeros(2, dtype=torch.float64, device=self._device)
        message[0], message[1] = place, own
        dist.all_reduce(message, group=self._group)
        if float(message[0]) != place * self._group.size():
            raise ModuleError(
                f"the ranks of a pipeline are at different places of a hook: this one is at {act}, of which comes a "
                f"tensor of shape {tuple(value.shape)} of pipeline rank {min(ranks)}.",
                fix="let hooks do the same on every rank, and only what follows depend on the rank",
            )
        return message[1]


class HookValues(TorchFunctionMode):
    """Around a hook of the user's: follows what is computed from parameters, and brings what is missing.

    Args:
        holders: Who has what.
        exchange: Brings it.
    """

    def __init__(self, holders: Holders, exchange: Exchange) -> None:
        super().__init__()
        self._holders, self._exchange = holders, exchange
        self._with_gradient: dict[int, bool] | None = None
        self._runs = False

    def run(self, hook: Callable[[], _Result]) -> _Result:
        """Returns what a hook returns."""
        if self._runs:
            return hook()
        self._runs, self._with_gradient = True, None
        try:
            with self:
                return hook()
        finally:
            self._runs = False
            self._holders.tidy()

    def brought(self, value: Tensor, act: str) -> Tensor:
        """Returns a tensor with values on every rank."""
        ranks = self._holders.of(value)
        if ranks is None:
            return value
        one = value.numel() == 1 and not value.is_complex()
        bring = self._exchange.number if one else self._exchange.whole
        return bring(value, ranks, act)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        act = getattr(func, "__name__", "")
        if act.startswith("_foreach_"):
            return self._each(func, act, args, options)
        if getattr(func, "__self__", None) in _GRADIENTS:
            if act == "__get__":
                return self._gradient(func, args[0])
            known = self._has_gradient(args[0]) if act == "__set__" else None
            if known is not None and self._with_gradient is not None:
                self._with_gradient[id(args[0])] = args[1] is not None
        tensors = [*tensors_in((*args, *options.values()))]
        here = all(self._holders.of(tensor) is None for tensor in tensors)
        # Initialisations of torch draw for absent parameters too, and look at what they have drawn by themselves.
        if here or sys._getframe(1).f_globals is vars(init):
            return func(*args, **options)
        left, values = self._met(act, tensors, _targets(func, args, options))
        if values:
            args, options = pytree.tree_map_only(Tensor, lambda each: values.get(id(each), each), (args, options))
        result = func(*args, **options)
        if not left or writes_to_first(func):
            return result
        of = "" if act in _VIEWS else _number_of(act, left)
        ranks = _common(self._ranks(left))
        return pytree.tree_map_only(Tensor, lambda each: self._noted(each, ranks, of), result)

    # ---- where values are missing ----

    def _met(
        self, act: str, tensors: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Brings arguments that meet where no rank has all of them.

        Returns:
            Those that lie on some ranks still, and the values of the others by identity.
        """
        lying = [tensor for tensor in tensors if self._holders.of(tensor) is not None]
        given = [tensor for tensor in lying if not _is_in(tensor, targets)]
        if act in _READS:
            wanted = [tensor for tensor in given if act not in _READS_OF_ALL or not tensor.dim()]
        elif not _common(self._ranks(lying)) or any(self._is_foreign(target, given) for target in targets):
            wanted = given
        else:
            wanted = []
        values = {id(tensor): self.brought(tensor, act) for tensor in wanted}
        return [tensor for tensor in lying if id(tensor) not in values], values

    def _is_foreign(self, target: Tensor, given: Sequence[Tensor]) -> bool:
        """Whether all ranks have a tensor that is written to; one like a parameter may be a copy, and lie with it."""
        return self._holders.of(target) is None and all(target.shape != each.shape or not each.dim() for each in given)

    def _ranks(self, tensors: Iterable[Tensor]) -> Iterator[Ranks]:
        return (ranks for tensor in tensors if (ranks := self._holders.of(tensor)) is not None)

    def _noted(self, result: Tensor, ranks: Ranks, of: str) -> Tensor:
        if of and not result.dim() and not result.is_complex():
            return self._exchange.number(result, ranks, of)
        self._holders.note(result, ranks)
        return result

    # ---- lists ----

    def _each(self, func: Any, act: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """An operation on the tensors of several lists, those at each place by themselves."""
        count = len(args[0])
        rows = [i for i, row in enumerate(args) if isinstance(row, list | tuple) and len(row) == count]
        columns = [tuple(args[i][at] for i in rows) for at in range(count)]
        written = writes_to_first(func)
        met = [self._met(act, [*tensors_in(column)], column[:1] if written else ()) for column in columns]
        values = {key: value for _, brought in met for key, value in brought.items()}
        if values:
            args = pytree.tree_map_only(Tensor, lambda each: values.get(id(each), each), args)
        results = func(*args, **options)
        if written:
            return results
        noted = []
        for result, (left, _) in zip(results, met, strict=True):
            noted.append(self._noted(result, _common(self._ranks(left)), _number_of(act, left)) if left else result)
        return type(results)(noted)

    # ---- gradients ----

    def _gradient(self, func: Any, tensor: Tensor) -> Any:
        """The gradient of a parameter, there or not as on the rank that holds it."""
        there = self._has_gradient(tensor)
        if there is False:
            return None
        gradient = tensor.gradient() if there and isinstance(tensor, Absent) else func(tensor)
        ranks = self._holders.of(tensor)
        if gradient is not None and ranks is not None:
            self._holders.note(gradient, ranks)
        return gradient

    def _has_gradient(self, parameter: Tensor) -> bool | None:
        """Whether a parameter had a gradient when the hook first asked for one; None for what lies on all ranks."""
        if not self._holders.is_parameter(parameter):
            return None
        if self._with_gradient is None:
            parameters = self._holders.parameters
            here = [not isinstance(each, Absent) and each.grad is not None for each in parameters]
            found = self._exchange.any_of(here)
            self._with_gradient = {id(each): there for each, there in zip(parameters, found, strict=True)}
        return self._with_gradient[id(parameter)]


@contextmanager
def without_hook_values() -> Iterator[None]:
    """Context for what the library does inside hooks: its ranks do different things with parameters."""
    stack = _get_current_function_mode_stack()
    if not any(map(_is_ours, stack)):
        yield
        return
    others = [mode for mode in stack if not _is_ours(mode)]
    _replace_modes(others)
    try:
        yield
    finally:
        _replace_modes(stack)


def as_everywhere(value: Any, act: str) -> Any:
    """Returns a value of a hook as all ranks have it; outside of hooks, and if it is no tensor, as it is."""
    modes = [mode for mode in _get_current_function_mode_stack() if _is_ours(mode)]
    if not modes or not isinstance(value, Tensor):
        return value
    with without_hook_values():
        return modes[-1].brought(value, act)


def _is_ours(mode: object) -> TypeGuard[HookValues]:
    return isinstance(mode, HookValues)


def _replace_modes(modes: Sequence[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


# How a gradient is asked for.
_GRADIENTS: tuple[Any, ...] = (Tensor.grad, Absent.grad)


def _targets(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    named = [options["out"]] if options.get("out") is not None else []
    is_set = getattr(func, "__name__", "") == "__set__"
    return [*tensors_in([*(args[:1] if is_set or writes_to_first(func) else ()), *named])]


def _number_of(act: str, tensors: Sequence[Tensor]) -> str:
    """Returns what a call is if it makes numbers of tensors with dims; of others it gives what may be themselves."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return f"{act} of {shapes}" if any(shapes) else ""


def _is_in(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _common(ranks: Iterable[Ranks]) -> Ranks:
    found = [*ranks]
    return frozenset.intersection(*found) if found else frozenset()


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
