"""What a schedule would do in time: torch's action lists, played with given times of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.parallel.pipeline.schedule.actions import Action, rank_actions
from lightning_3d.parallel.pipeline.schedule.timeline import Event, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Time that one micro-batch takes on a stage; without measurements a backward is as long as two forwards.

    Attributes:
        forward: Of the forward.
        backward_input: Of the half of the backward that gives the gradient of the stage's input.
        backward_weight: Of the half that gives the gradients of its weights.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, action: Action) -> float:
        """Returns the time of a computation."""
        times = {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}
        return times.get(action.kind, self.backward_input + self.backward_weight)


def simulate(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    times: Sequence[StageTimes] | None = None,
    send: float = 0.0,
    whole_backward: bool = False,
) -> Timeline:
    """Plays a schedule: each rank computes in its order, as soon as what it needs has come.

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        microbatches: As many as the schedule can run (:func:`runnable_microbatches`).
        stages_per_rank: Stages that each rank owns.
        times: Of each stage in model order; None for equal stages.
        send: Time from the end of a computation until another rank has its result, which computes on meanwhile.
        whole_backward: Backwards are never split, also where the schedule would.
    """
    actions = rank_actions(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if whole_backward:
        actions = tuple(unsplit(row) for row in actions)
    times = times or (StageTimes(),) * (ranks * stages_per_rank)
    return Timeline(ranks, _play(actions, times, send))


def unsplit(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Returns a rank's computations with whole backwards in place of their first halves."""
    whole = (Action(action.stage, "B", action.microbatch) if action.kind == "I" else action for action in actions)
    return tuple(action for action in whole if action.kind != "W")


def _play(actions: Sequence[Sequence[Action]], times: Sequence[StageTimes], send: float) -> tuple[Event, ...]:
    rank_of = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    ended: dict[tuple[int, bool, int], float] = {}
    free = [0.0] * len(actions)
    waiting = [list(reversed(row)) for row in actions]
    events: list[Event] = []
    while any(waiting):
        before = len(events)
        for rank, row in enumerate(waiting):
            while row and (ready := _ready(row[-1], ended, rank_of, send)) is not None:
                action = row.pop()
                start = max(free[rank], ready)
                free[rank] = start + times[action.stage].of(action)
                if action.kind != "W":
                    ended[action.stage, action.kind == "F", action.microbatch] = free[rank]
                events.append(Event(rank, action, start, free[rank]))
        assert len(events) > before, f"ranks wait for each other: {[str(row[-1]) for row in waiting if row]}"
    return tuple(sorted(events, key=lambda event: (event.rank, event.start, event.end)))


def _ready(
    action: Action, ended: dict[tuple[int, bool, int], float], rank_of: dict[int, int], send: float
) -> float | None:
    """When what a computation needs is there; None if it is not computed yet. A rank's own comes before it anyway."""
    forward = action.kind == "F"
    neighbour = action.stage - 1 if forward else action.stage + 1
    if action.kind == "W" or neighbour not in rank_of:
        return 0.0
    end = ended.get((neighbour, forward, action.microbatch))
    if end is None:
        return None
    return end if rank_of[neighbour] == rank_of[action.stage] else end + send
