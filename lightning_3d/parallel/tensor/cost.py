"""The price of the tensor axis: what an optimizer step sends over it.

With sequence parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2) each sum becomes a reduce-scatter and an all-gather, which send as much together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.mesh.spec import TENSOR_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums over the tensor axis that a part of the model needs for one micro-batch.

    Attributes:
        forward: Calls in forward.
        backward: Calls in backward.
        payload: Bytes of what each of them sums.
        of_states: They sum hidden states, which sequence parallelism leaves cut.
        gathers: More gathers of hidden states that are cut: a forward that runs again needs the input of its last
            product, and not the last sum.
    """

    forward: int
    backward: int
    payload: int
    of_states: bool = True
    gathers: int = 0

    @property
    def calls(self) -> int:
        """Calls of a micro-batch."""
        return self.forward + self.backward


def tensor_traffic(sums: Iterable[Sums], *, size: int, microbatches: int, sequence: bool = False) -> Traffic:
    """Returns the collectives of one optimizer step, as each rank takes part in them.

    Args:
        sums: Of all parts of the model.
        size: Number of tensor ranks.
        microbatches: Micro-batches of an optimizer step: those of a batch x accumulated batches.
        sequence: Sequence parallelism.
    """
    if size == 1:
        return Traffic()
    total = Traffic()
    for part in sums:
        kinds = ("reduce_scatter", "all_gather") if sequence and part.of_states else ("all_reduce",)
        for kind in kinds:
            calls = part.calls + (part.gathers if kind == "all_gather" else 0)
            total += _row(kind, size, microbatches * calls, part.payload)
    return total


def _row(operation: str, size: int, calls: int, payload: int) -> Traffic:
    row = TrafficRow(operation=operation, axis=TENSOR_AXIS, group_size=size, calls=calls, payload=calls * payload)
    return Traffic(rows=(row,) if row.payload else ())
