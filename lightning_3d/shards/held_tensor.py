"""A DTensor that knows which part of the original a rank holds: whole and copied in its order, refused where it is not.

torch takes a DTensor for its parts in the order of the ranks, which is not the order of a packed weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from typing_extensions import override

from lightning_3d.shards.deep import deep_copy
from lightning_3d.shards.held import Held, in_order
from lightning_3d.shards.writes import Writes


class HeldTensor(DTensor):
    """A DTensor and what this rank holds of it."""

    __slots__ = ()
    _held: Held
    _writes: Writes

    @override
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the whole tensor in its original order. All ranks of the mesh call it together."""
        layout, axis = self._held.layout, self._held.axis
        if layout is None or axis is None or self._held.in_order:
            return super().full_tensor(grad_placements=grad_placements)
        return in_order(self, layout, axis)

    @override
    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """DTensor's own, for those whose order it knows."""
        if not self._held.in_order:
            raise self._held.refusal("redistribute")
        return super().redistribute(*args, **kwargs)

    __deepcopy__ = deep_copy

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check_saving()
        # Files are read where this class is not known.
        return bare(self).__reduce_ex__(protocol)

    @override
    def __create_write_items__(self, *args: Any) -> Any:
        self._check_saving()
        return super().__create_write_items__(*args)

    @override
    def __create_chunk_list__(self) -> Any:
        self._check_saving()
        return super().__create_chunk_list__()  # type: ignore[no-untyped-call]

    def _check_saving(self) -> None:
        """Refuses to be written in the order of the ranks, or read in it."""
        if not self._held.in_order:
            act, whole = "saving as it lies", f"trainer.strategy.full_tensor({self._held.name!r}, tensor)"
            raise self._held.refusal(act, fix=f"trainer.save_checkpoint(path), or {whole} on every rank, to save that")


def bare(tensor: DTensor) -> DTensor:
    """Returns the plain DTensor on the same memory, without history."""
    return DTensor.__new__(DTensor, tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)


def replicated(tensor: DTensor) -> DTensor:
    """Returns a DTensor that every rank has the whole of. All ranks of its mesh call it together."""
    return bare(tensor).redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
