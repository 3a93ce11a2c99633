"""What travels between two stages: the values one by one, or packed where the micro-batches of a step differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_3d.parallel.pipeline.record.step import Value


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that is sent, as torch's static metadata want it.

    Attributes:
        shape: Its shape on this rank.
        dtype: Its dtype.
        requires_grad: Whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize

    def on(self, device: torch.device | str) -> Tensor:
        """Returns a tensor of zeros of this kind, or one without values on the meta device."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


def slot_of(value: Value) -> Slot:
    """Returns what a rank sends of a value: its own part if the value is cut over the tensor axis."""
    shape = list(value.shape)
    if value.layout is not None:
        assert value.layout.fits(value.tensor_ranks), f"{value} is not cut in {value.tensor_ranks} equal parts"
        shape[value.layout.dim] //= value.tensor_ranks
    return Slot(tuple(shape), value.dtype, value.requires_grad)


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a stage receives in one step.

    Attributes:
        slots: The tensors that are sent.
        packed: They hold the values in one run each, one tensor for each dtype and need of a gradient.
    """

    slots: tuple[Slot, ...]
    packed: bool = False

    def pack(self, values: Sequence[Tensor], kind: Sequence[Slot]) -> tuple[Tensor, ...]:
        """Returns the tensors to send for the values of one micro-batch, contiguous ones.

        Args:
            values: The values.
            kind: What they are, in the same order.
        """
        values = [value if slot.requires_grad else value.detach() for value, slot in zip(values, kind, strict=True)]
        if not self.packed:
            return tuple(_own(value).contiguous() for value in values)
        return tuple(self._packed(target, values, kind) for target in self.slots)

    def unpack(self, received: Sequence[Tensor], kind: Sequence[Slot]) -> tuple[Tensor, ...]:
        """Returns the values of one micro-batch from the tensors that were sent.

        Args:
            received: The tensors.
            kind: What the values are.
        """
        if not self.packed:
            return tuple(received)
        rest = dict(zip(map(_group, self.slots), received, strict=True))
        values = []
        for slot in kind:
            run = rest[_group(slot)]
            values.append(run[: slot.numel].view(slot.shape))
            rest[_group(slot)] = run[slot.numel :]
        return tuple(values)

    def _packed(self, target: Slot, values: Sequence[Tensor], kind: Sequence[Slot]) -> Tensor:
        runs = [value.reshape(-1) for value, slot in zip(values, kind, strict=True) if _group(slot) == _group(target)]
        if not runs:
            return target.on(values[0].device)
        run = torch.cat(runs)
        return pad(run, (0, target.numel - run.numel()))


def boundary_of(kinds: Iterable[Sequence[Slot]]) -> Boundary:
    """Returns what a stage receives when the values of its micro-batches are of these kinds."""
    different = list(dict.fromkeys(tuple(kind) for kind in kinds))
    if len(different) == 1:
        return Boundary(different[0])
    longest: dict[tuple[torch.dtype, bool], int] = {}
    for kind in different:
        lengths: dict[tuple[torch.dtype, bool], int] = {}
        for slot in kind:
            lengths[_group(slot)] = lengths.get(_group(slot), 0) + slot.numel
        longest |= {group: max(length, longest.get(group, 0)) for group, length in lengths.items()}
    return Boundary(tuple(Slot((length,), *group) for group, length in longest.items()), packed=True)


def _own(value: Tensor) -> Tensor:
    """The value as a tensor that may be detached in place, as torch does with what a stage returned."""
    return value.clone() if value._is_view() or (value.is_leaf and value.requires_grad) else value


def _group(slot: Slot) -> tuple[torch.dtype, bool]:
    return slot.dtype, slot.requires_grad
