"""A stage as torch's schedules call it: by the number of the micro-batch, with exact halves of backwards, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.boundary import Boundary, Slot
from lightning_3d.parallel.pipeline.schedule.split import why_whole
from lightning_3d.parallel.pipeline.schedule.stopwatch import Stopwatch

# The loss of the last stage as torch sees it; its gradient is 1 in any dtype.
ROOT = Slot((), torch.float32, True)


class ScheduledStage(PipelineStage):
    """One stage in one schedule.

    Args:
        module: The stage module; called with the received tensors and ``mb``, the number of the micro-batch.
        index: The stage's place in model order.
        boundaries: What each stage receives, in model order; nothing for the first.
        device: Where it computes.
        group: The pipeline group.
        stopwatch: Takes the time of its computations.
        whole: Called with the reason when a backward in halves is run as a whole; None if all are, always.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        *,
        boundaries: Sequence[Boundary],
        device: torch.device,
        group: dist.ProcessGroup,
        stopwatch: Stopwatch,
        whole: Callable[[str], None] | None,
    ) -> None:
        count = len(boundaries)
        sent = boundaries[index + 1].slots if index + 1 < count else (ROOT,)
        super().__init__(
            module,
            index,
            count,
            device,
            input_args=tuple(slot.on("meta") for slot in boundaries[index].slots),
            output_args=tuple(slot.on("meta") for slot in sent),
            group=group,
        )
        self._stopwatch = stopwatch
        self._whole = whole
        self._complete: set[int] = set()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the stage on one micro-batch; torch's arguments say which, and whether to keep the output."""
        options = {name: value for name, value in kwargs.items() if name == "save_forward_output"}
        with self._stopwatch.over(Action(self.stage_index, "F", fwd_chunk_id)), _cause_first():
            return super().forward_one_chunk(fwd_chunk_id, (), {"mb": fwd_chunk_id}, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of one micro-batch, or its first half where halves are exact."""
        if not self.has_backward:
            return
        whole = full_backward or not self._splits(bwd_chunk_id, loss)
        if whole and not full_backward:
            self._complete.add(bwd_chunk_id)
        with self._stopwatch.over(Action(self.stage_index, "B" if whole else "I", bwd_chunk_id)), _cause_first():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=whole, last_backward=last_backward)
        if not whole:
            # torch sends what autograd gave, and that may be expanded.
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the second half of a backward, if the first was not the whole."""
        if bwd_chunk_id in self._complete:
            self._complete.remove(bwd_chunk_id)
            return
        new = [parameter for parameter in self.submod.parameters() if parameter.grad is None]
        with self._stopwatch.over(Action(self.stage_index, "W", bwd_chunk_id)), _cause_first():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            # torch adds the next gradient in place, though this one may be expanded, or be another parameter's too, or
            # a buffer that gradients are received in.
            for parameter in new:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing to clean up. Torch would drop all gradients that other schedules have brought since the last step."""

    def _splits(self, microbatch: int, loss: Tensor | None) -> bool:
        if self._whole is None:
            return False
        # The first stage has no input: its first half is empty and its second the whole.
        if self.is_first:
            return True
        outputs, inputs = self.fwd_cache[microbatch]
        received = inputs[: len(self.args_recv_info[microbatch])]
        reason = why_whole(outputs if loss is None else (loss,), received, tuple(self.submod.parameters()))
        if reason is not None:
            self._whole(f"stage {self.stage_index}: {reason}")
        return reason is None


@contextmanager
def _cause_first() -> Iterator[None]:
    """Raises what happened in a stage, as it was, instead of torch's error about it, which lists tensors."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None:
            raise
        context = cause.__context__
        try:
            raise cause
        finally:
            cause.__context__ = context
