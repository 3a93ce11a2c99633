"""How long pipeline ranks wait, and how many micro-batches they hold: closed forms of torch's schedules.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2,
give the forms for whole backwards; schedules whose backwards come in halves (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism") are played, since what they wait depends on how the halves compare.
"""

from __future__ import annotations

from functools import lru_cache

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES, SCHEDULES, V_SCHEDULES
from lightning_3d.errors import ConfigError, MeshError, nearest
from lightning_3d.parallel.pipeline.schedule.actions import SPLIT_SCHEDULES
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate

# Beyond this many rounds of the ranks the wait does not grow any more.
_ROUNDS = 3
_GRAIN = 48


def checked_schedule(schedule: str, stages_per_rank: int) -> str:
    """Returns the schedule that runs: 1F1B with several stages on a rank is the interleaved one.

    Args:
        schedule: Name of a schedule.
        stages_per_rank: Stages that each rank owns.

    Raises:
        ConfigError: There is no such schedule.
        MeshError: It does not run with so many stages on a rank.
    """
    if schedule not in SCHEDULES:
        close = nearest(schedule, SCHEDULES)
        raise ConfigError(
            f"there is no pipeline_schedule {schedule!r}.",
            valid=SCHEDULES,
            fix=f"pipeline_schedule={close}" if close else None,
        )
    if schedule == "1f1b" and stages_per_rank > 1:
        return "interleaved1f1b"
    if schedule in ONE_STAGE_SCHEDULES and stages_per_rank != 1:
        raise MeshError(f"{schedule} runs one stage on a rank, not {stages_per_rank}.", fix="stages_per_rank=1")
    if schedule in V_SCHEDULES and stages_per_rank != 2:
        raise MeshError(f"{schedule} runs two stages on a rank, not {stages_per_rank}.", fix="stages_per_rank=2")
    return schedule


def idle_time(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    stages_per_rank: int = 1,
) -> float:
    """Returns how long each rank waits in a step: its length less what a rank computes.

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis, p.
        microbatches: As many as the schedule can run.
        forward: Time of a stage's forward of one micro-batch, F.
        backward_input: Time of the half of its backward for the input, I.
        backward_weight: Time of the half for the weights, W.
        stages_per_rank: Stages that each rank owns.

    Returns:
        (p - 1) (F + I + W) for whole backwards, in times of a stage; else what playing the schedule gives.
    """
    if ranks == 1:
        return 0.0
    whole = (ranks - 1) * (forward + backward_input + backward_weight)
    if schedule not in SPLIT_SCHEDULES and (schedule in ONE_STAGE_SCHEDULES or microbatches >= ranks):
        return whole
    # Unequal rounds of interleaved schedules depend on the whole number; the others do not beyond some rounds.
    uneven = schedule not in V_SCHEDULES and microbatches % ranks
    played = microbatches if uneven else min(microbatches, _ROUNDS * ranks + microbatches % ranks)
    unit = forward + backward_input + backward_weight
    shares = (round(part / unit * _GRAIN) / _GRAIN if unit else 0.0 for part in (forward, backward_input))
    return unit * _played(schedule, ranks, played, stages_per_rank, *shares)


def interleaved_sends(link: float, *, ranks: int, stages: int, microbatches: int, seconds: float) -> float:
    """Returns what sends add to a step of a schedule with several stages on a rank, which computes on meanwhile.

    So many micro-batches are on their way that only the first and the last one wait, at each of p v - 1 links, as long
    as a link takes less than (p - 1) / (2 p) of a stage; beyond that every micro-batch waits for the rest.

    Args:
        link: Seconds of one send.
        ranks: Degree of the pipeline axis, p.
        stages: Stages on a rank, v.
        microbatches: Micro-batches of a step.
        seconds: Time of a micro-batch on a rank, all its stages, forward and backward.
    """
    covered = (ranks - 1) / (2 * ranks) * seconds / stages
    late = microbatches * stages * (ranks - 1) / ranks * max(0.0, link - covered)
    return 2 * (ranks * stages - 1) * link + late


def in_flight(schedule: str, *, ranks: int, rank: int, microbatches: int, stages_per_rank: int = 1) -> int:
    """Returns how many forwards of one stage and one micro-batch wait on a rank for their backward at the worst moment.

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        rank: The pipeline rank.
        microbatches: As many as the schedule can run.
        stages_per_rank: Stages that each rank owns.
    """
    every = microbatches * stages_per_rank
    if ranks == 1:
        return 1 if schedule == "1f1b" else every
    a_round = microbatches // max(1, microbatches // ranks)
    held = {
        "1f1b": ranks - rank,
        "interleaved1f1b": (stages_per_rank - 1) * a_round + 2 * (ranks - 1 - rank) + 1,
        "interleavedzerobubble": (stages_per_rank - 1) * a_round + ranks,
        "zbvzerobubble": min(2 * ranks, microbatches + rank + 1),
        "dualpipev": 2 * ranks + 1,
    }
    return min(every, held.get(schedule, every))


@lru_cache(maxsize=4096)
def _played(schedule: str, ranks: int, microbatches: int, stages_per_rank: int, forward: float, inputs: float) -> float:
    """The wait of a schedule whose stages take a unit of time, of which these shares are forward and input's half."""
    times = StageTimes(forward=forward, backward_input=inputs, backward_weight=1 - forward - inputs)
    timeline = simulate(
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        times=(times,) * (ranks * stages_per_rank),
    )
    return timeline.duration - microbatches * stages_per_rank
