"""ZeRO 1 to 3 by FSDP2's ``fully_shard``, and ZeRO 0 by its ``replicate``: unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_3d.parallel.data.door import Door, only_by_doors, tell, units_of
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.kept import KeptUnits
from lightning_3d.parallel.data.replicas import check_replicas_met
from lightning_3d.parallel.data.scalars import ScalarGradients
from lightning_3d.parallel.data.zero import ZeroStage


class UnitEngine(DataEngine):
    """ZeRO 1 to 3 by ``fully_shard``, or ZeRO 0 by ``replicate``, both of FSDP2.

    Args:
        root: The module whose units were sharded, itself the last of them.
        stage: When units gather and reduce.
        sharded: Whether there are shards (``fully_shard``) or whole copies (``replicate``).
        scalars: Averages the gradients of what no unit manages.
    """

    def __init__(self, root: FSDPModule, stage: ZeroStage, *, sharded: bool, scalars: ScalarGradients) -> None:
        self._root = root
        self._stage = stage
        self._sharded = sharded
        self._scalars = scalars
        self._last: bool | None = None
        self._inside = False
        self._left = False
        self._units = units_of(root)
        self._kept = KeptUnits(self._units)
        # What a step sees as soon as it begins; the other units stay hidden until they are called.
        self._shown_first: list[FSDPModule] | None = None
        self._door = Door(root)
        only_by_doors(root)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls the step through the root's door."""
        self._kept.renew(gather=False)
        self._kept.show(self._first_units())
        self._inside, self._left = True, False
        try:
            return self._door(step, *args)
        finally:
            self._inside = False
            self._kept.hide()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Shows what is recomputed there gathered parameters."""
        self._kept.renew(gather=True)
        self._kept.show()
        try:
            yield
        finally:
            self._kept.hide()

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call through the root's door, and lets go what it gathered: weights may change before the next.

        Inside a step, where the root is gathered, it is a call like any other.
        """
        if self._inside:
            if self._left:
                self._left = False
                self._root.unshard()
            return call()
        try:
            return self.run(call)
        finally:
            self.rest()

    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Tells every unit what its next backward does."""
        if last == self._last:
            return
        self._last = last
        for unit in self._units:
            settings = self._stage.root(last=last) if unit is self._root else self._stage.blocks(last=last)
            # Whole copies are at hand again without any communication.
            tell(unit, settings if self._sharded else replace(settings, reshard=True))

    def gradients_complete(self) -> None:
        """Averages what no unit manages."""
        check_replicas_met(self._units)
        self._scalars.average()

    def _first_units(self) -> list[FSDPModule]:
        if self._shown_first is None:
            blocks = [unit for unit in self._units if unit is not self._root]
            wait = self._sharded and not self._stage.reshard_blocks_after_forward
            self._kept.show_when_called(blocks if wait else ())
            self._shown_first = [self._root] if wait else self._units
        return self._shown_first

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Passes the loss through the door: its backward then ends with the reduction of every unit."""
        # The loss is no argument: FSDP2 takes a gradient that reaches an argument for the end of the whole backward.
        # It registers its hook on what leaves the door; a clone is a tensor of its own, not a view.
        passed: Tensor = self._door(loss.clone)
        self._kept.hide()
        return passed

    def after_inner_backward(self) -> None:
        """Leaves the parameters at rest, where gradients show; the next call of a part gathers the root again."""
        self.rest()
        self._left = True

    def rest(self) -> None:
        """Lets the gathered parameters of every unit go."""
        for unit in self._units:
            unit.reshard()
