"""What each rank does in which order: the action lists of torch's schedules, without stages or processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES
from lightning_3d.parallel.pipeline.placement import ranks_of_stages

# Forward, whole backward, and its halves: for the inputs of a stage, and for its weights.
Kind = Literal["F", "B", "I", "W"]
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

# Backward comes in halves, so that those for weights fill the bubble.
SPLIT_SCHEDULES = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
_IN_ROUNDS = ("interleaved1f1b", "interleavedzerobubble")


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a rank, printed as torch prints it: 2F0 is stage 2's forward of micro-batch 0.

    Attributes:
        stage: Index of the stage.
        kind: What is computed.
        microbatch: Index of the micro-batch.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def rank_actions(
    schedule: str, *, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Returns what each rank computes, in order.

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        microbatches: As many as the schedule can run (:func:`runnable_microbatches`).
        stages_per_rank: Stages that each rank owns.
    """
    if schedule == "1f1b":
        return tuple(tuple(_one_forward_one_backward(rank, ranks, microbatches)) for rank in range(ranks))
    placed = ranks_of_stages(schedule, ranks, stages_per_rank)
    facts = [_StageFacts(index, len(placed), ranks) for index, rank in enumerate(placed) if rank == 0]
    make: Any = get_schedule_class(schedule)
    order = make(facts[0] if schedule in ONE_STAGE_SCHEDULES else facts, microbatches).pipeline_order
    return tuple(tuple(_computations(order[rank])) for rank in range(ranks))


def runnable_microbatches(schedule: str, *, ranks: int, microbatches: int) -> int:
    """Returns the least number of micro-batches, not below ``microbatches``, that a schedule can run.

    1F1B needs one for each stage and DualPipeV too, of which it has two on a rank. Interleaved schedules run in as
    many equal rounds as the micro-batches hold ranks. The others take any number.

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        microbatches: Micro-batches of a batch.
    """
    if schedule == "1f1b":
        return max(microbatches, ranks)
    if schedule == "dualpipev":
        return max(microbatches, 2 * ranks)
    if schedule in _IN_ROUNDS:
        while microbatches % max(1, microbatches // ranks):
            microbatches += 1
    return microbatches


@dataclass(slots=True)
class _StageFacts:
    """What a schedule asks a stage of rank 0 before it runs; it writes to the last two."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: nn.Module | None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    # What torch's 1F1B runs. The list that torch 2.13 shows for its last rank begins with micro-batch 1.
    ahead = min(microbatches, ranks - rank)
    yield from (Action(rank, "F", index) for index in range(ahead))
    for index in range(microbatches):
        yield Action(rank, "B", index)
        if ahead + index < microbatches:
            yield Action(rank, "F", ahead + index)


def _computations(actions: Iterable[Any]) -> Iterator[Action]:
    for action in actions:
        # None is a slot in which a rank waits; an overlapped pair is computed one after the other.
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computations(action.sub_actions)
            continue
        for kind in _KINDS:
            if action.computation_type.value == kind:
                yield Action(action.stage_index, kind, action.microbatch_index)
