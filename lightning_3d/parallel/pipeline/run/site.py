"""What all runs of one rank know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.run.functions import ParameterNames
from lightning_3d.parallel.pipeline.run.hooks import UserHooks
from lightning_3d.random.streams import RandomStreams
from lightning_3d.shards.group import ShardGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What all runs of one rank know.

    Attributes:
        module: The whole module, without what other ranks own.
        plan: The plan that was applied to it.
        rank: This rank's place on the pipeline axis.
        group: The pipeline axis' ranks of this data and tensor position.
        device: This rank's device.
        hooks: The user's forward hooks.
        names: First names of parameters.
        streams: Random streams; None leaves randomness to torch's generator.
        tensor_group: The tensor axis; None where its degree is 1.
        compiled: Whether the user has compiled anything of the module.
    """

    module: nn.Module
    plan: PipelinePlan
    rank: int
    group: dist.ProcessGroup
    device: torch.device
    hooks: UserHooks
    names: ParameterNames
    streams: RandomStreams | None = None
    tensor_group: ShardGroup | None = None
    compiled: bool = False

    def skip(self, name: str) -> None:
        """Notes a call of a module that another rank makes."""
        if self.streams is not None:
            self.streams.skip(name)

    def look_again(self) -> None:
        """Called where a run begins: on the tensor axis parameters are read as other tensors while a step runs."""
        if self.tensor_group is not None:
            self.names.refresh()
