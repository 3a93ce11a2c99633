"""Degrees, rank order, coordinates and groups of a mesh: pure arithmetic, no torch, no process group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import MeshError, nearest
from lightning_3d.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One row of the table of axes.

    Args:
        key: Short name, also the field of `MeshSpec` and `Coordinate`.
        name: Name of the axis in a DeviceMesh and of its groups.
        option: The user's option that sets its degree.
    """

    key: str
    name: str
    option: str


# Ordered as the dimensions of the DeviceMesh, and from the axis that bears slow links best to the one that bears them
# least. A new axis is a new row here and a field with default 1 in MeshSpec and Coordinate.
AXES = (
    Axis(key="data", name="data_parallel", option="data_parallel_size"),
    Axis(key="pipeline", name="pipeline_parallel", option="pipeline_parallel_size"),
    Axis(key="tensor", name="tensor_parallel", option="tensor_parallel_size"),
)
AXIS_KEYS = tuple(axis.key for axis in AXES)
DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS = tuple(axis.name for axis in AXES)

DATA_REPLICATE = "data_replicate"
DATA_SHARD = "data_shard"
MODEL_GROUP = "model_parallel"

# Ranks are numbers with mixed digits; each axis is one digit, the data axis is two: replicas of shards.
_DIGITS_OF_AXIS: Mapping[str, tuple[str, ...]] = {axis.key: (axis.key,) for axis in AXES} | {
    "data": (DATA_REPLICATE, DATA_SHARD)
}

# Name of a group -> the digits that vary inside it.
_DIGITS_OF_GROUP: Mapping[str, tuple[str, ...]] = {
    **{axis.name: _DIGITS_OF_AXIS[axis.key] for axis in AXES},
    DATA_REPLICATE: (DATA_REPLICATE,),
    DATA_SHARD: (DATA_SHARD,),
    MODEL_GROUP: tuple(axis.key for axis in AXES if axis.key != "data"),
}
GROUPS = tuple(_DIGITS_OF_GROUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """Where a rank stands on every axis; ``data = data_replicate * shards + data_shard``."""

    data: int = 0
    data_replicate: int = 0
    data_shard: int = 0
    pipeline: int = 0
    tensor: int = 0

    def __str__(self) -> str:
        return " ".join(f"{key} {getattr(self, key)}" for key in AXIS_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSpec:
    """The degrees of a mesh and the order in which ranks fill it.

    Args:
        data: Data-parallel degree: ranks that see different samples.
        pipeline: Pipeline-parallel degree.
        tensor: Tensor-parallel degree.
        data_replicate: Replicas inside the data axis, a divisor of ``data``; 1 shards over the whole axis.
        rank_order: Every axis once, outermost first: neighbouring ranks differ on the last one.

    Raises:
        MeshError: A degree is no positive integer, the replicas do not divide the data axis, or the order is not
            a permutation of the axes.
    """

    data: int
    pipeline: int
    tensor: int
    data_replicate: int = 1
    rank_order: tuple[str, ...] = AXIS_KEYS

    def __post_init__(self) -> None:
        for axis in AXES:
            _check_degree(axis.option, getattr(self, axis.key))
        _check_degree("data_replicate_size", self.data_replicate)
        if self.data % self.data_replicate:
            raise MeshError(
                f"data_replicate_size={self.data_replicate} does not divide data_parallel_size={self.data}.",
                valid=_divisors(self.data),
                fix=f"data_replicate_size={math.gcd(self.data, self.data_replicate)}",
            )
        object.__setattr__(self, "rank_order", _checked_order(self.rank_order))

    @classmethod
    def of(cls, config: StrategyConfig, world: int) -> MeshSpec:
        """Returns the spec that a strategy's options make of a world of processes.

        Raises:
            MeshError: The degrees do not multiply to the world, or `MeshSpec` refuses one of them.
        """
        size = config.data_parallel_size
        return cls.resolve(
            world,
            data=size if isinstance(size, int) else "auto",
            pipeline=config.pipeline_parallel_size,
            tensor=config.tensor_parallel_size,
            data_replicate=config.data_replicate_size,
            rank_order=config.rank_order,
        )

    @classmethod
    def resolve(
        cls,
        world: int,
        *,
        data: int | Literal["auto"] = "auto",
        pipeline: int = 1,
        tensor: int = 1,
        data_replicate: int = 1,
        rank_order: Sequence[str] | str = AXIS_KEYS,
    ) -> MeshSpec:
        """Returns the spec of a world of processes; ``data="auto"`` takes what the other degrees leave.

        Args:
            world: Number of processes.
            data: Data-parallel degree or ``"auto"``.
            pipeline: Pipeline-parallel degree.
            tensor: Tensor-parallel degree.
            data_replicate: Replicas inside the data axis.
            rank_order: Axes outermost first, as a sequence or as text with commas.

        Raises:
            MeshError: The degrees do not multiply to the world, or `MeshSpec` refuses one of them.
        """
        degrees: dict[str, object] = {"data": data, "pipeline": pipeline, "tensor": tensor}
        for axis in AXES:
            if axis.key != "data" or data != "auto":
                _check_degree(axis.option, degrees[axis.key])
        size = _data_size(world, data, {"pipeline": pipeline, "tensor": tensor})
        return cls(
            data=size,
            pipeline=pipeline,
            tensor=tensor,
            data_replicate=data_replicate,
            rank_order=_checked_order(rank_order),
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.size(axis.key) for axis in AXES)

    @property
    def data_shard(self) -> int:
        """Ranks that share one sharded copy of the parameters: data / data_replicate."""
        return self.data // self.data_replicate

    def size(self, name: str) -> int:
        """Returns the number of ranks along an axis (its key) or in a group (its name in `GROUPS`)."""
        digits = _DIGITS_OF_AXIS.get(name) or _group_digits(name)
        sizes = self._digit_sizes()
        return math.prod(sizes[digit] for digit in digits)

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the coordinate of a global rank.

        Raises:
            MeshError: The rank is not of this mesh.
        """
        _check_position("rank", rank, self.world)
        digits = {}
        rest = rank
        for digit, size in reversed(self._digit_sizes().items()):
            rest, digits[digit] = divmod(rest, size)
        return Coordinate(data=digits[DATA_REPLICATE] * self.data_shard + digits[DATA_SHARD], **digits)

    def at(self, *, data: int = 0, pipeline: int = 0, tensor: int = 0) -> Coordinate:
        """Returns the coordinate at a position on every axis, e.g. ``spec.at(data=3)``.

        Raises:
            MeshError: A position lies outside its axis.
        """
        positions = {"data": data, "pipeline": pipeline, "tensor": tensor}
        for key, position in positions.items():
            _check_position(f"{key} position", position, self.size(key))
        replicate, shard = divmod(data, self.data_shard)
        return Coordinate(data_replicate=replicate, data_shard=shard, **positions)

    def rank(self, coordinate: Coordinate) -> int:
        """Returns the global rank at a coordinate.

        Raises:
            MeshError: A position lies outside its axis, or the two parts of the data position disagree.
        """
        if coordinate != self.at(**{key: getattr(coordinate, key) for key in AXIS_KEYS}):
            raise MeshError(
                f"data position {coordinate.data} is not replica {coordinate.data_replicate}, "
                f"shard {coordinate.data_shard} of {self.data_replicate} x {self.data_shard}.",
                fix="build coordinates with MeshSpec.at(data=..., pipeline=..., tensor=...)",
            )
        return sum(getattr(coordinate, digit) * stride for digit, stride in self._strides().items())

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group that a rank belongs to, ordered by their position in it.

        Args:
            name: One of `GROUPS`: an axis, a part of the data axis, or ``"model_parallel"``, the ranks that hold
                one copy of the model together.
            rank: Any member.

        Raises:
            MeshError: Unknown name, or a rank that is not of this mesh.
        """
        digits = _group_digits(name)
        here = self.coordinate(rank)
        strides = self._strides()
        base = rank - sum(getattr(here, digit) * strides[digit] for digit in digits)
        return tuple(base + offset for offset in self._offsets(digits))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Returns every group of a name, in the order of their lowest ranks; together they hold each rank once."""
        digits = _group_digits(name)
        inside = tuple(self._offsets(digits))
        bases = sorted(self._offsets(digit for digit in self._digit_sizes() if digit not in digits))
        return tuple(tuple(base + offset for offset in inside) for base in bases)

    def __str__(self) -> str:
        parts = []
        for key in AXIS_KEYS:
            hybrid = key == "data" and self.data_replicate > 1
            parts.append(
                f"{key} {self.size(key)}" + (f" ({self.data_replicate} replicas x {self.data_shard})" if hybrid else "")
            )
        order = "" if self.rank_order == AXIS_KEYS else f", ranks ordered {', '.join(self.rank_order)}"
        return f"{' x '.join(parts)} = {counted(self.world, 'rank')}{order}"

    def _digit_sizes(self) -> dict[str, int]:
        """Digits and their sizes, outermost first."""
        return {digit: getattr(self, digit) for key in self.rank_order for digit in _DIGITS_OF_AXIS[key]}

    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for digit, size in reversed(self._digit_sizes().items()):
            strides[digit] = stride
            stride *= size
        return strides

    def _offsets(self, digits: Iterable[str]) -> list[int]:
        """Rank offsets of all values of some digits, the first digit varying slowest."""
        sizes, strides = self._digit_sizes(), self._strides()
        offsets = [0]
        for digit in digits:
            offsets = [base + value * strides[digit] for base in offsets for value in range(sizes[digit])]
        return offsets


def _data_size(world: int, data: int | Literal["auto"], others: dict[str, int]) -> int:
    _check_degree("number of processes", world)
    product = math.prod(others.values())
    options = {axis.key: axis.option for axis in AXES}
    named = " x ".join(f"{options[key]}={size}" for key, size in others.items())
    if data == "auto":
        if world % product == 0:
            return world // product
        raise MeshError(
            f"{world} processes cannot be divided by {named}, which need a multiple of {product}.",
            valid=_valid_degrees(world, others),
            fix=f"trainer.devices={max(product, world - world % product)} (processes in all)",
        )
    if data * product == world:
        return data
    degrees = {"data": data, **others}
    fixes = [f"trainer.devices={data * product} (processes in all)"]
    for key, size in degrees.items():
        fitting, left = divmod(world * size, data * product)
        if left == 0:
            fixes.append(f"{options[key]}={fitting}")
    raise MeshError(
        f"data_parallel_size={data} x {named} = {data * product}, but there are {world} processes.",
        fix=" or ".join(fixes),
    )


def _valid_degrees(world: int, others: dict[str, int]) -> str:
    """For each degree that is not the data axis': the values that fit the world while the rest stays."""
    texts = []
    for axis in AXES:
        rest = math.prod(size for key, size in others.items() if key != axis.key)
        if axis.key in others and world % rest == 0:
            texts.append(f"{axis.option} in {{{', '.join(map(str, _divisors(world // rest)))}}}")
    return "; ".join(texts) if texts else f"degrees whose product divides {world}"


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _check_degree(option: str, degree: object) -> None:
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        raise MeshError(f"{option}={degree!r} is not a positive integer.", valid="1, 2, 3, ...", fix=f"{option}=1")


def _check_position(what: str, position: int, size: int) -> None:
    if not 0 <= position < size:
        raise MeshError(f"{what} {position} is outside the mesh.", valid=f"0 to {size - 1}")


def _checked_order(order: Sequence[str] | str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in (order.split(",") if isinstance(order, str) else order))
    if sorted(keys) != sorted(AXIS_KEYS):
        raise MeshError(
            f"rank_order={','.join(keys)!r} does not name every axis once.",
            valid=f"a permutation of {', '.join(AXIS_KEYS)}, outermost first",
            fix=f"rank_order='{','.join(AXIS_KEYS)}'",
        )
    return keys


def _group_digits(name: str) -> tuple[str, ...]:
    if name not in _DIGITS_OF_GROUP:
        close = nearest(name, GROUPS)
        raise MeshError(
            f"the mesh has no group {name!r}.", valid=GROUPS, fix=f"did you mean {close!r}?" if close else None
        )
    return _DIGITS_OF_GROUP[name]
