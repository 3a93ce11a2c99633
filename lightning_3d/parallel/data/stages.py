"""ZeRO 0 to 3 in the stages of a pipeline: units below the root of each stage, driven by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_3d.parallel.data.door import Door, as_module, tell, units_of
from lightning_3d.parallel.data.engine import DataEngine
from lightning_3d.parallel.data.kept import KeptUnits
from lightning_3d.parallel.data.replicas import check_replicas_met
from lightning_3d.parallel.data.scalars import ScalarGradients
from lightning_3d.parallel.data.zero import ZeroStage


class StageEngine(DataEngine):
    """ZeRO 1 to 3 by ``fully_shard``, or ZeRO 0 by ``replicate``, for the stages that a rank owns.

    Args:
        roots: The modules of the stages, whose units were sharded, themselves the last of each; lowest stage first.
        stage: When units gather and reduce.
        scalars: Averages the gradients of what no unit manages.
        cast: Dtype that the floating point inputs of a step are computed with; None leaves them.
    """

    def __init__(
        self,
        roots: Sequence[FSDPModule],
        stage: ZeroStage,
        *,
        scalars: ScalarGradients,
        cast: torch.dtype | None = None,
    ) -> None:
        self._doors = [Door(root) for root in roots]
        self._backwards = [StageBackwards(root, stage) for root in roots]
        self._units = [unit for root in roots for unit in units_of(root)]
        self._kept = KeptUnits(self._units)
        self._scalars = scalars
        self._cast = cast
        self._inside = False

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls a step that goes through the roots' own forwards, as schedules do.

        One inside of a schedule leaves what is shown: a checkpoint reads it in backward.
        """
        if self._inside:
            return step(*self._computed(args))
        self._inside = True
        try:
            with self.backward():
                return step(*self._computed(args))
        finally:
            self._inside = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Shows a schedule gathered parameters."""
        self._kept.renew(gather=False)
        self._kept.show()
        try:
            yield
        finally:
            self._kept.hide()

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call through the doors of all stages, and lets go what it gathered.

        Inside a step or another visit it is a call like any other.
        """
        if self._inside:
            return call()
        self._inside = True
        self._kept.renew(gather=False)
        self._kept.show()
        try:
            for door in reversed(self._doors):
                call = partial(door, call)
            return call()
        finally:
            self._inside = False
            self.rest()

    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Tells every stage how many backwards come, and whether the optimizer step comes after them."""
        for stage in self._backwards:
            stage.expect(backwards, last=last)

    def gradients_complete(self) -> None:
        """Averages what no unit manages."""
        check_replicas_met(self._units)
        self._scalars.average()

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Not in a pipeline, whose schedule runs every backward."""
        raise AssertionError("manual optimization is refused in a pipeline")

    def after_inner_backward(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """Lets the gathered parameters of every unit go."""
        for unit in self._units:
            unit.reshard()

    def _computed(self, values: tuple[Any, ...]) -> Any:
        if self._cast is None:
            return values
        return apply_to_collection(values, Tensor, partial(_cast_floating, self._cast))


class StageBackwards:
    """Decides for one stage what each backward does, in place of torch's pipeline stage.

    That one forbids every reduction before each backward, and asks for all of them when a schedule is through: ZeRO 1,
    for schedules that an optimizer step follows. Here the ZeRO stage decides, and the last backward reduces, while it
    still computes; the end of the schedule reduces what has arrived since.

    Args:
        root: The module of the stage; some of its methods are replaced on the instance.
        stage: When units gather and reduce.
    """

    def __init__(self, root: FSDPModule, stage: ZeroStage) -> None:
        self._root = root
        self._stage = stage
        self._units = units_of(root)
        self._expected = 1
        self._last = True
        as_module(root).__dict__.update(
            set_requires_gradient_sync=self._decide, set_reshard_after_backward=_decided_with_the_reduction
        )

    def expect(self, backwards: int, *, last: bool) -> None:
        """Says how many backwards the next schedule has, and whether the optimizer step comes after it."""
        self._expected, self._last = backwards, last

    def _decide(self, reduce: bool, *, recurse: bool = True) -> None:
        """Torch's stage wants a reduction (the schedule is through) or none (a backward begins)."""
        self._expected -= not reduce
        last = self._last and self._expected <= 0
        for unit in self._units:
            tell(unit, self._stage.root(last=last) if unit is self._root else self._stage.blocks(last=last))


def _decided_with_the_reduction(reshard: bool, *, recurse: bool = True) -> None:
    """Torch's stage always says both, the reduction after this."""


def _cast_floating(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
