"""Which rank of the pipeline axis owns which stage, by schedule."""

from __future__ import annotations

from lightning_3d.config.schema import V_SCHEDULES


def ranks_of_stages(schedule: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the pipeline rank of each stage, in model order.

    Schedules of the V family place a rank's second stage in mirrored order, so that the first and the last stage lie
    on one rank (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"); all others place stages round-robin
    (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2.2).

    Args:
        schedule: Name of the schedule.
        ranks: Degree of the pipeline axis.
        stages_per_rank: Stages that each rank owns.
    """
    if schedule in V_SCHEDULES:
        assert stages_per_rank == 2, "the options are checked"
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * stages_per_rank
