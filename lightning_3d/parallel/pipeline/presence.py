"""From the plan of the pipeline axis to what its ranks have, for those that know no plan."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.shards.presence import Presence


def presence_of(plan: PipelinePlan, group: dist.ProcessGroup, device: torch.device) -> Presence:
    """Returns what the ranks of a pipeline have after a plan was applied.

    Args:
        plan: The plan.
        group: The pipeline axis' ranks of this data and tensor position.
        device: This rank's device.
    """
    return Presence(
        group=group,
        rank=group.rank(),
        device=device,
        holders={name: plan.ranks_holding(name) for name in plan.holders},
        modules={name: plan.stages[stages[0]].rank for name, stages in plan.modules.items()},
        others=plan.last_rank,
    )
