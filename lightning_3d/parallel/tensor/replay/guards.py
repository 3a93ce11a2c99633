"""Guards: one generated function for each recorded program that says whether it fits a call, and finds its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.parallel.tensor.replay.caches import Update, fresh_layer, is_cache
from lightning_3d.parallel.tensor.replay.changes import Changes
from lightning_3d.parallel.tensor.replay.surroundings import Surroundings
from lightning_3d.parallel.tensor.replay.writer import Constants, Unwritable, a_kind, define, plain_text
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor

Guard = Callable[[tuple[Any, ...], Mapping[str, Any]], "tuple[Any, ...] | None"]

_AND = " \\\n            and "
_CONSTANTS = (str, torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What the arguments of one call look like.

    Attributes:
        conditions: Expressions over ``args`` and ``kwargs`` that hold for every call that looks the same.
        places: Expressions for the plain tensors in them, of shards the local parts, and for caches.
        inputs: Those of this call.
        constants: What the conditions name.
    """

    conditions: tuple[str, ...]
    places: tuple[str, ...]
    inputs: tuple[Any, ...]
    constants: Constants

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The plain tensors."""
        return tuple(value for value in self.inputs if isinstance(value, Tensor))

    @property
    def caches(self) -> tuple[Any, ...]:
        """The caches."""
        return tuple(value for value in self.inputs if not isinstance(value, Tensor))


def read_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Returns what the arguments of a call look like.

    Raises:
        Unwritable: One of them may change without being seen to.
    """
    reader = _ArgumentReader()
    reader.read(args, "args", "its arguments")
    reader.read(dict(kwargs), "kwargs", "its arguments")
    return Signature(
        conditions=tuple(reader.conditions),
        places=tuple(reader.places.values()),
        inputs=tuple(reader.inputs),
        constants=reader.constants,
    )


class _ArgumentReader:
    def __init__(self) -> None:
        self.conditions: list[str] = []
        self.places: dict[int, str] = {}
        self.inputs: list[Any] = []
        self.constants = Constants()

    def read(self, value: Any, place: str, label: str) -> None:
        if isinstance(value, ShardTensor):
            self._shard(value, place, label)
        elif isinstance(value, PartialTensor):
            self._is(f"type({place})", type(value))
            self._is(f"{place}._group", value._group)
            self.read(value._value, f"{place}._value", label)
        elif type(value) in (Tensor, nn.Parameter):
            self._is(f"type({place})", type(value))
            self._tensor(value, place)
        elif type(value) is list or (isinstance(value, tuple) and not isinstance(value, torch.Size)):
            self._is(f"type({place})", type(value))
            self.conditions.append(f"len({place}) == {len(value)}")
            for index, item in enumerate(value):
                self.read(item, f"{place}[{index}]", f"{label}[{index}]" if place != "args" else f"argument {index}")
        elif is_cache(value):
            self._is(f"type({place})", type(value))
            self._input(value, place)
        elif type(value) is dict:
            self._mapping(value, place, label)
        elif value is None or isinstance(value, bool):
            self.conditions.append(f"{place} is {value}")
        elif type(value) in (int, float, str):
            self._is(f"type({place})", type(value))
            self.conditions.append(f"{place} == {plain_text(value, self.constants)}")
        elif isinstance(value, _CONSTANTS):
            self._is(f"type({place})", type(value))
            self.conditions.append(f"{place} == {self.constants.name(value, 'value')}")
        else:
            raise Unwritable(f"{label} is {a_kind(value)}, whose changes cannot be seen")

    def _mapping(self, value: Mapping[Any, Any], place: str, label: str) -> None:
        self.conditions.append(f"type({place}) is dict and len({place}) == {len(value)}")
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise Unwritable(f"{label} has {a_kind(key)} as a key")
            self.conditions.append(f"{key!r} in {place}")
            self.read(item, f"{place}[{key!r}]", str(key) if place == "kwargs" else f"{label}[{key!r}]")

    def _shard(self, shard: ShardTensor, place: str, label: str) -> None:
        self._is(f"type({place})", type(shard))
        self._is(f"{place}._group", shard._group)
        self.conditions.append(f"{place}._dim == {shard._dim} and {place}._segments == {shard._segments!r}")
        # A shard may hold a shard of another axis.
        self.read(shard._local, f"{place}._local", label)

    def _tensor(self, tensor: Tensor, place: str) -> None:
        if not self._input(tensor, place):
            return
        self._is(f"{place}.dtype", tensor.dtype)
        device = self.constants.name(tensor.device, "device")
        self.conditions += [
            f"{place}.shape == {tuple(tensor.shape)!r}",
            f"{place}.stride() == {tensor.stride()!r}",
            f"{place}.device == {device}",
            f"{place}.requires_grad is {tensor.requires_grad}",
        ]

    def _input(self, value: Any, place: str) -> bool:
        """Returns whether a value is met for the first time."""
        earlier = self.places.get(id(value))
        if earlier is not None:
            self.conditions.append(f"{place} is {earlier}")
            return False
        self.places[id(value)] = place
        self.inputs.append(value)
        return True

    def _is(self, place: str, value: Any) -> None:
        stem = value.__name__ if isinstance(value, type) else type(value).__name__.lower()
        self.conditions.append(f"{place} is {self.constants.name(value, stem)}")


def write_guard(
    signature: Signature,
    *,
    changes: Changes,
    surroundings: Surroundings,
    global_values: Sequence[tuple[dict[str, Any], str, Any]],
    updates: Sequence[Update],
) -> Guard:
    """Returns the guard of a program.

    Args:
        signature: Of the call that was recorded.
        changes: Of the block, as they are now.
        surroundings: Torch's state in that call.
        global_values: Namespace, name and value of what the block read elsewhere.
        updates: Of caches.

    Returns:
        A function of the arguments of a call that returns their plain tensors and caches, or None if the program
        does not fit.
    """
    constants = signature.constants
    constants.values |= {
        "changes": changes,
        "fresh_layer": fresh_layer,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_inference_mode_enabled": torch.is_inference_mode_enabled,
        "is_autocast_enabled": torch.is_autocast_enabled,
        "get_autocast_dtype": torch.get_autocast_dtype,
    }
    conditions = [
        f"changes.count == {changes.count} and changes.training == {changes.training}",
        f"is_grad_enabled() is {surroundings.grad} and is_inference_mode_enabled() is {surroundings.inference}",
    ]
    for kind, dtype in surroundings.autocast:
        conditions.append(f"is_autocast_enabled({kind!r}) is {dtype is not None}")
        if dtype is not None:
            conditions.append(f"get_autocast_dtype({kind!r}) is {constants.name(dtype, 'dtype')}")
    conditions += signature.conditions
    for cache, layer, kind in updates:
        place = next(p for p, value in zip(signature.places, signature.inputs, strict=True) if value is cache)
        conditions.append(f"fresh_layer({place}, {layer}) == {kind!r}")
    for namespace, name, value in global_values:
        conditions.append(f"{constants.name(namespace, 'namespace')}.get({name!r}) == {constants.name(value, 'value')}")
    tensors = "".join(f"{place}, " for place in signature.places)
    lines = (
        "def guard(args, kwargs):",
        f"    if {_AND.join(conditions)}:",
        f"        return ({tensors})",
        "    return None",
    )
    guard: Guard = define("\n".join(lines), "guard", constants.values)
    return guard
