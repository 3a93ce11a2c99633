"""Metadata as plain containers: what ``torch.load(weights_only=True)`` reads without running any code of the file.

The plain value stands where the original stood, so other programs can use it; a list of notes beside it says which
plain values were something else, and :func:`from_plain` uses only a closed set of constructors to bring those back.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_3d.errors import CheckpointError
from lightning_3d.log import get_logger, process_rank

_log = get_logger(__name__)

Place: TypeAlias = tuple[Any, ...]
Note: TypeAlias = tuple[Place, str, Any]

_PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_NATIVE = (torch.dtype, torch.device, torch.Size)
_TYPES: Mapping[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (DictConfig, ListConfig, argparse.Namespace, AttributeDict, dict, list, tuple, collections.OrderedDict)
}
_FACTORIES: Mapping[str, type] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
_CONVERTIBLE = "numbers, text, tensors, arrays, paths, dates, enums, dataclasses, OmegaConf and Python's containers"
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A value in plain containers, and the notes that restore it."""

    value: Any
    notes: tuple[Note, ...]


def to_plain(value: Any, where: str = "") -> Plain:
    """Turns ``value`` into containers that load without running code.

    Kept and restored: dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict, range, OmegaConf configs
    (interpolations of a whole config stay unresolved; those of a part of one are resolved while its parent is there),
    argparse.Namespace, Lightning's AttributeDict, paths, dates and times, Decimal, UUID, NumPy scalars and arrays,
    tensors (on CPU). Kept as plain values for good: enums (their value), named tuples, dataclasses (their fields),
    callables and functools.partial (as a text that Hydra can instantiate). A module among hyperparameters is left out.

    Args:
        value: The value.
        where: Its name in the checkpoint, for errors.

    Raises:
        CheckpointError: A part of the value has another type; names the part and the type.
    """
    notes: list[Note] = []
    plain = _plain(value, (where,) if where else (), notes)
    start = 1 if where else 0
    return Plain(value=plain, notes=tuple((place[start:], kind, detail) for place, kind, detail in notes))


def from_plain(value: Any, notes: Sequence[Note]) -> Any:
    """Returns what :func:`to_plain` was given; places and kinds unknown here stay plain.

    Args:
        value: The plain value; its containers are changed in place.
        notes: The notes made beside it.
    """
    for place, kind, detail in sorted(notes, key=lambda note: -len(note[0])):
        value = _restored_at(value, tuple(place), kind, detail)
    return value


def _plain(value: Any, place: Place, notes: list[Note]) -> Any:
    if type(value) in _PRIMITIVES or isinstance(value, _NATIVE):
        return value
    for kinds, convert in _RULES:
        if isinstance(value, kinds):
            return convert(value, place, notes)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain_dict(fields, place, notes)
    if callable(value):
        return _plain_callable(value, place, notes)
    raise _refusal(place, value)


def _refusal(place: Place, value: Any) -> CheckpointError:
    name = ".".join(str(part) for part in place) or "the value"
    kind = type(value)
    return CheckpointError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold as plain data",
        valid=_CONVERTIBLE,
        fix=f"save_hyperparameters(ignore=[{place[-1]!r}])"
        if place and place[0] in _HYPER_PARAMETERS
        else f"store plain data in {name} (a dict of numbers, text and tensors)",
    )


def _plain_key(key: Any, place: Place) -> Any:
    if type(key) in _PRIMITIVES:
        return key
    if isinstance(key, enum.Enum):
        return _plain_key(key.value, place)
    if isinstance(key, pathlib.PurePath):
        return str(key)
    if isinstance(key, tuple):
        return tuple(_plain_key(part, place) for part in key)
    for primitive in (str, int, float):
        if isinstance(key, primitive):
            return primitive(key)
    raise _refusal((*place, f"key {key!r}"), key)


def _plain_dict(value: Mapping[Any, Any], place: Place, notes: list[Note]) -> dict[Any, Any]:
    plain: dict[Any, Any] = {}
    for key, part in value.items():
        name = _plain_key(key, place)
        plain[name] = _plain(part, (*place, name), notes)
    return plain


def _plain_list(value: Sequence[Any], place: Place, notes: list[Note]) -> list[Any]:
    return [_plain(part, (*place, index), notes) for index, part in enumerate(value)]


def _plain_tuple(value: tuple[Any, ...], place: Place, notes: list[Note]) -> tuple[Any, ...]:
    return tuple(_plain_list(value, place, notes))


def _plain_tensor(value: torch.Tensor, place: Place, notes: list[Note]) -> torch.Tensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise _refusal(place, value)
    whole = value.detach().cpu()
    # torch.save writes the whole storage behind a view.
    return whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole


def _plain_set(value: set[Any] | frozenset[Any], place: Place, notes: list[Note]) -> Any:
    if isinstance(value, set) and all(type(part) in _PRIMITIVES for part in value):
        return set(value)
    notes.append((place, "frozenset" if isinstance(value, frozenset) else "set", None))
    return _plain_list(list(value), place, notes)


def _plain_deque(value: collections.deque[Any], place: Place, notes: list[Note]) -> list[Any]:
    notes.append((place, "deque", value.maxlen))
    return _plain_list(list(value), place, notes)


def _plain_range(value: range, place: Place, notes: list[Note]) -> list[int]:
    notes.append((place, "range", (value.start, value.stop, value.step)))
    return list(value)


def _plain_ordered(value: Mapping[Any, Any], place: Place, notes: list[Note]) -> Any:
    return collections.OrderedDict(_plain_dict(value, place, notes))


def _plain_defaultdict(value: collections.defaultdict[Any, Any], place: Place, notes: list[Note]) -> dict[Any, Any]:
    factory = value.default_factory
    notes.append((place, "defaultdict", getattr(factory, "__name__", None) if factory in _FACTORIES.values() else None))
    return _plain_dict(value, place, notes)


def _plain_attributes(value: Mapping[Any, Any], place: Place, notes: list[Note]) -> dict[Any, Any]:
    notes.append((place, "attribute_dict", None))
    return _plain_dict(value, place, notes)


def _plain_namespace(value: argparse.Namespace, place: Place, notes: list[Note]) -> dict[Any, Any]:
    notes.append((place, "namespace", None))
    return _plain_dict(vars(value), place, notes)


def _plain_config(value: DictConfig | ListConfig, place: Place, notes: list[Note]) -> Any:
    notes.append((place, "omegaconf", None))
    part_of_another = value._get_parent() is not None
    try:
        content = OmegaConf.to_container(value, resolve=part_of_another)
    except Exception:
        # An interpolation that cannot be resolved here stays as it is written.
        content = OmegaConf.to_container(value, resolve=False)
    return _plain(content, place, notes)


def _plain_enum(value: enum.Enum, place: Place, notes: list[Note]) -> Any:
    return _plain(value.value, place, notes) if type(value.value) in _PRIMITIVES else value.name


def _plain_text(kind: str) -> Callable[[Any, Place, list[Note]], str]:
    def convert(value: Any, place: Place, notes: list[Note]) -> str:
        notes.append((place, kind, None))
        return value.isoformat() if hasattr(value, "isoformat") else str(value)

    return convert


def _plain_timedelta(value: datetime.timedelta, place: Place, notes: list[Note]) -> float:
    notes.append((place, "timedelta", (value.days, value.seconds, value.microseconds)))
    return value.total_seconds()


def _plain_scalar(value: np.generic, place: Place, notes: list[Note]) -> Any:
    notes.append((place, "numpy_scalar", value.dtype.str))
    return _plain(value.item(), place, notes)


def _plain_array(value: np.ndarray[Any, Any], place: Place, notes: list[Note]) -> torch.Tensor:
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
    except TypeError as error:
        raise _refusal(place, value) from error
    notes.append((place, "numpy_array", None))
    return tensor


def _plain_subclass(primitive: type) -> Callable[[Any, Place, list[Note]], Any]:
    return lambda value, place, notes: primitive(value)


def _plain_type(value: type, place: Place, notes: list[Note]) -> Any:
    name = f"{value.__module__}.{value.__qualname__}"
    if name in _TYPES:
        notes.append((place, "type", name))
        return None
    return _plain_callable(value, place, notes)


def _plain_module(value: torch.nn.Module, place: Place, notes: list[Note]) -> None:
    if not place or place[0] not in _HYPER_PARAMETERS:
        raise _refusal(place, value)
    _tell_left_out(".".join(map(str, place)), str(place[-1]))


@functools.cache
def _tell_left_out(place: str, name: str) -> None:
    """Says it at the first checkpoint, not at each one."""
    if process_rank() == 0:
        _log.warning(
            "%s is a module: its weights are in the state dict, so the checkpoint leaves it out of the "
            "hyperparameters; save_hyperparameters(ignore=[%r]) says so in the code",
            place,
            name,
        )


def _plain_partial(value: functools.partial[Any], place: Place, notes: list[Note]) -> dict[str, Any]:
    text: dict[str, Any] = {"_target_": _importable_name(value.func, place), "_partial_": True}
    if value.args:
        text["_args_"] = _plain_list(value.args, (*place, "_args_"), notes)
    return text | _plain_dict(value.keywords, place, notes)


def _plain_callable(value: Any, place: Place, notes: list[Note]) -> dict[str, Any]:
    return {"_target_": "hydra.utils.get_object", "path": _importable_name(value, place)}


def _importable_name(value: Any, place: Place) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise _refusal(place, value)
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        found = None
    if found is not value:
        raise _refusal(place, value)
    return f"{module}.{name}"


# Order matters: a rule stands before the rule of its base class.
_RULES: tuple[tuple[Any, Callable[[Any, Place, list[Note]], Any]], ...] = (
    (torch.Tensor, _plain_tensor),
    (torch.nn.Module, _plain_module),
    ((DictConfig, ListConfig), _plain_config),
    (enum.Enum, _plain_enum),
    (np.generic, _plain_scalar),
    (np.ndarray, _plain_array),
    (type, _plain_type),
    (str, _plain_subclass(str)),
    (int, _plain_subclass(int)),
    (float, _plain_subclass(float)),
    (AttributeDict, _plain_attributes),
    (collections.OrderedDict, _plain_ordered),
    (collections.defaultdict, _plain_defaultdict),
    (Mapping, _plain_dict),
    (argparse.Namespace, _plain_namespace),
    (tuple, _plain_tuple),
    (list, _plain_list),
    ((set, frozenset), _plain_set),
    (collections.deque, _plain_deque),
    (range, _plain_range),
    (pathlib.PurePath, _plain_text("path")),
    (datetime.datetime, _plain_text("datetime")),
    (datetime.date, _plain_text("date")),
    (datetime.time, _plain_text("time")),
    (datetime.timedelta, _plain_timedelta),
    (decimal.Decimal, _plain_text("decimal")),
    (uuid.UUID, _plain_text("uuid")),
    (functools.partial, _plain_partial),
)

_RESTORERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "omegaconf": lambda value, detail: OmegaConf.create(value),
    "namespace": lambda value, detail: argparse.Namespace(**value),
    "attribute_dict": lambda value, detail: AttributeDict(value),
    "defaultdict": lambda value, detail: collections.defaultdict(_FACTORIES.get(detail), value),
    "set": lambda value, detail: set(value),
    "frozenset": lambda value, detail: frozenset(value),
    "deque": lambda value, detail: collections.deque(value, maxlen=detail),
    "range": lambda value, detail: range(*detail),
    "path": lambda value, detail: pathlib.Path(value),
    "datetime": lambda value, detail: datetime.datetime.fromisoformat(value),
    "date": lambda value, detail: datetime.date.fromisoformat(value),
    "time": lambda value, detail: datetime.time.fromisoformat(value),
    "timedelta": lambda value, detail: datetime.timedelta(*detail),
    "decimal": lambda value, detail: decimal.Decimal(value),
    "uuid": lambda value, detail: uuid.UUID(value),
    "numpy_scalar": lambda value, detail: np.dtype(detail).type(value),
    "numpy_array": lambda value, detail: value.numpy(),
    "type": lambda value, detail: _TYPES.get(detail),
}


def _restored_at(value: Any, place: Place, kind: str, detail: Any) -> Any:
    if not place:
        return _RESTORERS[kind](value, detail) if kind in _RESTORERS else value
    key, rest = place[0], place[1:]
    try:
        part = value[key]
    except (KeyError, IndexError, TypeError):
        return value
    restored = _restored_at(part, rest, kind, detail)
    if isinstance(value, tuple):
        return (*value[:key], restored, *value[key + 1 :])
    value[key] = restored
    return value
