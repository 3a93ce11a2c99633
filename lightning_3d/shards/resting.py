"""Parameters between steps: DTensors with which hooks and callbacks compute what one device would, or get an error.

torch takes a DTensor for its parts in the order of the ranks, which is not the order of a packed weight. It also writes
to copies where a part of a cut tensor is asked for, and does nothing when ``.data`` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_3d.errors import ModuleError
from lightning_3d.shards.elementwise import Operation, operation
from lightning_3d.shards.held import Held
from lightning_3d.shards.held_tensor import HeldTensor, bare, replicated
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.protocol import storage_key
from lightning_3d.shards.writes import Writes, count_writes, tensors_in

# What stands in C behind these attributes of every tensor.
_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad

# Errors that have to do with parts, and that of views which torch has of even parts only.
_WORDS, _UNEVEN = ("got mixed", "sharding strategy", "placement changes"), "unevenly sharded"


def let_rest(module: nn.Module, layouts: Mapping[str, Layout], axis_name: str) -> None:
    """Makes every DTensor parameter of a module one that hooks can use; they stay the same objects.

    Args:
        module: The module, cut.
        layouts: How the tensor axis cuts parameters, by their first names.
        axis_name: The tensor axis' name in a mesh.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            _adopt(parameter, Held.of(name, parameter, layouts.get(name), axis_name))


class Resting(HeldTensor):
    """A parameter between steps, its gradient, or what is computed from them element by element.

    What acts on each element alone runs on the local parts, if all of them hold the same elements; whole tensors, equal
    on all ranks and in the original order, are cut for it. Reductions of everything are torch's. Whatever else is
    torch's too where DTensor knows the order, and else an error.
    """

    __slots__ = ()

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        act, options = operation(func), kwargs or {}
        result = _run(func, act, args, options)
        count_writes(act.targets(args, options))
        return result

    @property
    def data(self) -> Tensor:
        """The same elements without history; what is set is written to them."""
        own: Tensor = _DATA.__get__(self)
        return own

    @data.setter
    def data(self, value: Tensor) -> None:
        shape = self.shape if isinstance(value, DTensor) else self._held.shape
        if value.shape != shape or value.dtype != self.dtype:
            raise ModuleError(
                f"the data of '{self._held.name}' were set to a {value.dtype} tensor of shape {tuple(value.shape)}; "
                f"the mesh holds {self.dtype} of shape {tuple(shape)}.",
                fix="set data of the same shape and dtype",
            )
        self.data.copy_(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, held as the parameter is."""
        gradient: Tensor | None = _GRAD.__get__(self)
        if type(gradient) is DTensor:
            _adopt(gradient, self._held)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if isinstance(value, DTensor):
            self._check_gradient(value)
        elif value is not None and value.shape == self._held.shape:
            value = _like(self, self._held.part(value, self._local_tensor).clone())
        _GRAD.__set__(self, value)

    def _check_gradient(self, value: DTensor) -> None:
        """Refuses a DTensor whose rows may be others'; those that torch or we make for the parameter share its spec."""
        alike = value._held == self._held if isinstance(value, Resting) else value._spec is self._spec
        if not (alike or self._held.in_order):
            raise self._held.refusal("grad = a DTensor whose rows may lie in another order")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Writes to some elements, named as in the whole tensor."""
        held, device = self._held, self._local_tensor.device
        index, value = pytree.tree_map_only(DTensor, lambda each: each.full_tensor(), (index, value))
        chosen = torch.zeros(held.shape, dtype=torch.bool, device=device)
        values = torch.zeros(held.shape, dtype=self.dtype, device=device)
        chosen[index] = True
        values[index] = value
        self.copy_(torch.where(chosen, values, self))


class _Window(DTensor):
    """A view of a parameter that torch has made: a window on its memory, or a copy of what other ranks hold."""

    __slots__ = ()
    _of: Resting
    _writes: Writes
    _copied: bool

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        act = operation(func)
        target = args[0] if args else None
        if act.writes and isinstance(target, _Window) and target._copied:
            raise target._of._held.refusal(f"{act.name}, which would write to a copy of a part")
        result = _by_torch(func, act, args, kwargs or {})
        count_writes(act.targets(args, kwargs or {}))
        return result


class _Computed(DTensor):
    """What torch has computed from parameters and holds in parts."""

    __slots__ = ()
    _of: Resting

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = _by_torch(func, operation(func), args, kwargs or {})
        count_writes(operation(func).targets(args, kwargs or {}))
        return result


class _UnlikeError(Exception):
    """Tensors do not hold the same elements, so local parts cannot meet."""


def _adopt(tensor: DTensor, held: Held) -> None:
    """Makes a DTensor a resting one in place."""
    resting: Any = tensor
    resting._held, resting._writes = held, Writes()
    resting.__class__ = Resting


def _like(resting: Resting, local: Tensor, writes: Writes | None = None) -> Resting:
    """Returns a tensor that is held as another.

    Args:
        resting: The other.
        local: The local part.
        writes: Counts what is written to the memory of ``local``; None for new memory.
    """
    spec = resting._spec
    meta = spec.tensor_meta
    assert meta is not None, "it was made from a tensor"
    if meta.dtype is not local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    made: Any = DTensor.__new__(Resting, local, spec, requires_grad=False)
    made._held, made._writes = resting._held, writes or Writes()
    return cast(Resting, made)


def _bare(value: Any) -> Any:
    """Returns what torch's own operations take for a tensor or for a list of tensors, without history."""
    if isinstance(value, list | tuple):
        return [_bare(each) for each in value]
    if not isinstance(value, Resting | _Window | _Computed):
        return value
    return bare(value)


def _run(func: OpOverload, act: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        if act.kind == "each":
            return _each(func, act, args, kwargs)
        if act.kind == "lists":
            return _lists(func, act, args, kwargs)
        if act.kind == "draws" and isinstance(args[0], Resting):
            return _draw(func, act, args, kwargs)
        if act.kind == "compares":
            return _equal(*args)
    except _UnlikeError:
        pass
    return _by_torch(func, act, args, kwargs)


# ---- on local parts ----


def _each(func: OpOverload, act: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    anchor = _anchor(args[:1] if act.writes else (*args, *kwargs.values()))
    if anchor is None:
        raise _UnlikeError
    if func.is_view:
        # The local part itself, whose own writes torch counts.
        return _like(anchor, anchor._local_tensor, anchor._writes)
    result = func(
        *[_local(value, anchor) for value in args],
        **{name: _local(value, anchor) for name, value in kwargs.items()},
    )
    if not act.writes:
        return _finished(_like(anchor, result), anchor._held)
    return _finished(anchor, anchor._held)


def _finished(tensor: Resting, held: Held) -> Resting:
    if held.padded:
        held.clear_padding(tensor._local_tensor)
    return tensor


def _lists(func: OpOverload, act: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on the tensors of several lists, all first ones, all second ones, and so on."""
    rows = {i: row for i, row in enumerate(args) if isinstance(row, list | tuple) and len(row) == len(args[0])}
    anchors = [_anchor(beside[:1] if act.writes else beside) for beside in zip(*rows.values(), strict=True)]
    if act.writes_several and any(
        value.dim() and not isinstance(value, Resting) for value in tensors_in(rows.values())
    ):
        raise _UnlikeError
    given = [
        [_beside(*each) for each in zip(row, anchors, strict=True)] if i in rows else _number(row)
        for i, row in enumerate(args)
    ]
    results = func(*given, **{name: _number(value) for name, value in kwargs.items()})
    if act.writes:
        for anchor in anchors:
            if anchor is not None:
                _finished(anchor, anchor._held)
        return results
    return [
        result if anchor is None else _finished(_like(anchor, result), anchor._held)
        for result, anchor in zip(results, anchors, strict=True)
    ]


def _draw(func: OpOverload, act: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random numbers: every rank draws those of one device, and keeps its part."""
    anchor, others = args[0], (*args[1:], *kwargs.values())
    if any(isinstance(value, Tensor) for value in others):
        raise _UnlikeError
    local, held = anchor._local_tensor, anchor._held
    drawn = func(local.new_zeros(held.shape), *args[1:], **kwargs)
    part = held.part(drawn, local)
    if not act.writes:
        return _like(anchor, part.contiguous())
    local.copy_(part)
    return anchor


def _anchor(values: Sequence[Any]) -> Resting | None:
    """Returns the tensor whose parts a result has: one that is cut, if there is one."""
    found = None
    for value in values:
        if isinstance(value, Resting):
            if value._held.cut:
                return value
            found = value if found is None else found
    return found


def _beside(value: Any, anchor: Resting | None) -> Any:
    """A value of a list whose other tensors at that place may all be plain."""
    if anchor is not None:
        return _local(value, anchor)
    if isinstance(value, DTensor):
        raise _UnlikeError
    return value


def _local(value: Any, anchor: Resting) -> Any:
    """Returns what meets the local part of another tensor.

    Raises:
        _UnlikeError: It holds other elements.
    """
    if isinstance(value, Resting) and (value._held is anchor._held or value._held == anchor._held):
        return value._local_tensor
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return _number(value)
    held = anchor._held
    if isinstance(value, DTensor):
        if not _is_whole(value):
            raise _UnlikeError
        value = value._local_tensor
    lengths = zip(reversed(value.shape), reversed(held.shape), strict=False)
    if value.dim() > len(held.shape) or any(own not in (1, length) for own, length in lengths):
        raise _UnlikeError
    return held.part(value, anchor._local_tensor)


def _number(value: Any) -> Any:
    """Returns a tensor without dims as every rank has it; no other tensor has a place beside lists."""
    if not isinstance(value, DTensor):
        return value
    if value.dim():
        raise _UnlikeError
    return value._local_tensor if _is_whole(value) else value.full_tensor()


def _is_whole(value: DTensor) -> bool:
    return all(isinstance(placement, Replicate) for placement in value.placements)


# ---- by torch ----


def _by_torch(func: OpOverload, act: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What DTensor makes of it, where it is exact."""
    tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
    resting = [tensor for tensor in tensors if isinstance(tensor, Resting)]
    whole = act.reduces_all(args, kwargs)
    for each in resting:
        held = each._held
        if not (held.in_order or (whole and (act.sums or not held.padded))):
            raise held.refusal(act.name)
    try:
        result = func(*map(_bare, args), **{name: _bare(value) for name, value in kwargs.items()})
    except RuntimeError as error:
        if _UNEVEN in str(error) and not act.writes:
            result = func(*pytree.tree_map_only(DTensor, replicated, tuple(args)), **kwargs)
        elif any(word in str(error) for word in _WORDS):
            raise _source(tensors)._held.refusal(act.name, str(error).splitlines()[0]) from error
        else:
            raise
    if act.writes and isinstance(args[0], Tensor):
        return args[0]
    if act.kind == "views":
        return _windows(args[0], result)
    return pytree.tree_map_only(DTensor, partial(_computed, _source(tensors)), result)


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors are equal; where they are not held alike, as a whole."""
    shapes = [value._held.shape if isinstance(value, Resting) else value.shape for value in (one, other)]
    if shapes[0] != shapes[1]:
        return False
    if isinstance(one, Resting) and isinstance(other, Resting) and one._held == other._held:
        # Torch would ask all ranks that there are, not those that hold the two.
        return not bool((one != other).any())
    return torch.equal(*(value.full_tensor() if isinstance(value, DTensor) else value for value in (one, other)))


def _source(tensors: Sequence[Tensor]) -> Resting:
    """Returns a parameter that some tensors come from."""
    found = (tensor if isinstance(tensor, Resting) else getattr(tensor, "_of", None) for tensor in tensors)
    return next(each for each in found if each is not None)


def _computed(of: Resting, result: DTensor) -> Tensor:
    """Returns a result of torch's: a number whole, since reading a part of it would be another one on each rank."""
    if not result.dim():
        return result.full_tensor()
    if type(result) is DTensor:
        made: Any = result
        made._of = of
        made.__class__ = _Computed
    return result


def _windows(seen: Any, result: Any) -> Any:
    """Marks views of a parameter as such."""

    def mark(view: DTensor) -> DTensor:
        shared = storage_key(view._local_tensor) == storage_key(seen._local_tensor)
        window: Any = view
        window._of = seen._of if isinstance(seen, _Window) else seen
        window._writes = seen._writes
        window._copied = not shared or (isinstance(seen, _Window) and seen._copied)
        window.__class__ = _Window
        return view

    if isinstance(seen, Resting | _Window):
        return pytree.tree_map_only(DTensor, mark, result)
    return pytree.tree_map_only(DTensor, partial(_computed, _source([seen])), result)
