"""Makes a schedule of torch.distributed.pipelining for the shapes of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES, V_SCHEDULES
from lightning_3d.parallel.pipeline.schedule.stage import ScheduledStage

_FORWARD = (
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
    _ComputationType.RECV_F,
    _ComputationType.UNSHARD,
    _ComputationType.RESHARD,
)


def build_schedule(name: str, stages: Sequence[ScheduledStage], *, microbatches: int, lazy_units: bool) -> Any:
    """Returns a schedule that runs forward and backward; its last stage returns the loss itself.

    Args:
        name: Name of the schedule.
        stages: The stages of this rank.
        microbatches: As many as the schedule can run.
        lazy_units: Units are gathered by their own forward and backward, not for a whole stage ahead.
    """
    schedule = _made(name, stages, microbatches, loss_fn=_only)
    if name not in ONE_STAGE_SCHEDULES:
        _leave_units(schedule, lazy=lazy_units)
    return schedule


def build_forward_schedule(name: str, stages: Sequence[ScheduledStage], *, microbatches: int, lazy_units: bool) -> Any:
    """Returns a schedule that runs any number of micro-batches forward, on the stages of the named schedule's ranks.

    Args:
        name: Name of the schedule that trains.
        stages: The stages of this rank.
        microbatches: Any number.
        lazy_units: Units are gathered by their own forward, not for a whole stage ahead.
    """
    if name in ONE_STAGE_SCHEDULES:
        return _made("gpipe", stages, microbatches)
    schedule = _made("zbvzerobubble" if name in V_SCHEDULES else "loopedbfs", stages, microbatches)
    # Left in, backwards would pass gradients that are not there between the two stages of a rank.
    orders: Mapping[int, Sequence[Any]] = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [action for action in order if action.computation_type in _FORWARD] for rank, order in orders.items()
    }
    _leave_units(schedule, lazy=lazy_units)
    return schedule


def _made(name: str, stages: Sequence[ScheduledStage], microbatches: int, **options: Any) -> Any:
    make: Any = get_schedule_class(name)
    return make(stages[0] if name in ONE_STAGE_SCHEDULES else list(stages), microbatches, scale_grads=False, **options)


def _only(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    (loss,) = outputs
    return loss


def _leave_units(schedule: Any, *, lazy: bool) -> None:
    """Has units decide themselves when they let go, for they may stay gathered until the optimizer step.

    Args:
        schedule: The schedule.
        lazy: They decide when they are gathered too, instead of all of a stage ahead of its first forward.
    """
    schedule.register_custom_function(
        _ComputationType.RESHARD,
        lambda action, context: context.schedule_ref.unsharded_stages.discard(action.stage_index),
    )
    if lazy:
        schedule.register_custom_function(
            _ComputationType.UNSHARD,
            lambda action, context: context.schedule_ref.unsharded_stages.add(action.stage_index),
        )
