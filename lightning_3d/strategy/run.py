"""What one process has for all runs of a strategy: its mesh, groups, streams and doors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.gradients import PipelineShare, clip_by_norm, clip_by_value
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh, model_mesh, pipeline_mesh, tensor_mesh
from lightning_3d.mesh.spec import MODEL_GROUP, TENSOR_AXIS, MeshSpec
from lightning_3d.random.streams import RandomStreams
from lightning_3d.strategy.checkpoints import CheckpointDoor
from lightning_3d.strategy.data.dealing import LoaderDealer
from lightning_3d.strategy.data.ends import LoaderEnds
from lightning_3d.strategy.data.places import LoaderPlaces
from lightning_3d.strategy.faults.nonfinite import FiniteCheck
from lightning_3d.strategy.faults.replicas import ReplicaCheck, alike, drawing_alike
from lightning_3d.strategy.faults.signals import SignalsOfAll
from lightning_3d.strategy.faults.stopping import CommonStop
from lightning_3d.strategy.loaded import Origin
from lightning_3d.strategy.logging.collectives import DataCollectives
from lightning_3d.strategy.logging.named import NamedValues
from lightning_3d.strategy.setup.callbacks import CallbackDoors


class RunOnMesh:
    """The mesh of this process, and what works over it. Made when the processes have met; a collective call.

    Args:
        spec: Degrees of the axes.
        device: This rank's device.
        config: The strategy's options.
    """

    def __init__(self, spec: MeshSpec, device: torch.device, config: StrategyConfig) -> None:
        self.device = device
        timeout = timedelta(seconds=config.timeout_seconds)
        self.mesh = build_device_mesh(spec, device.type, timeout)
        self.data_group = data_axis_mesh(self.mesh).get_group()
        self.pipeline_group = pipeline_mesh(self.mesh).get_group()
        # Ranks that see the same samples.
        self.model_group = model_mesh(self.mesh, timeout).get_group()
        rank = dist.get_rank()
        self.same_batches = ReplicaCheck(self.model_group, spec.group(MODEL_GROUP, rank))
        self.same_tensors = ReplicaCheck(tensor_mesh(self.mesh).get_group(), spec.group(TENSOR_AXIS, rank))
        self.world_group = whole_world()
        self.seed = _agreed_seed(self.world_group)
        self.stop = CommonStop(self.world_group)
        self.streams = RandomStreams(self.seed, [device]) if config.layout_free_random else None
        self.clipper = MeshClipper(self.shared_group)
        self.finite = FiniteCheck(config.on_nonfinite, spec, self.world_group, device)
        self.collectives = DataCollectives(self.data_group, self.world_group, device)
        self.signals = SignalsOfAll()
        self.named = NamedValues(
            self.world_group,
            device,
            data_rank=self.data_group.rank(),
            data_size=self.data_group.size(),
            signals=self.signals,
        )
        self.callbacks = CallbackDoors(self.collectives, self.model_group)
        self.ends = LoaderEnds(self.collectives, config.uneven, partial(alike, group=self.model_group))
        self.dealer = LoaderDealer(
            self.data_group.size(), self.data_group.rank(), partial(drawing_alike, self.data_group)
        )
        self.places = LoaderPlaces(self.data_group.size())
        self.checkpoints = CheckpointDoor(
            distributed=config.save_distributed_checkpoint,
            group=self.world_group,
            device=device,
            origin=Origin(data=spec.data, pipeline=spec.pipeline, tensor=spec.tensor, zero_stage=config.zero_stage),
            timeout=timeout if config.async_save else None,
        )

    @property
    def shared_group(self) -> dist.ProcessGroup | None:
        """All ranks, or None where there is only one."""
        return self.world_group if self.world_group.size() > 1 else None


class MeshClipper:
    """Clipping over all ranks of a mesh.

    Attributes:
        share: What this rank knows of the gradients of other stages; None where there are none.

    Args:
        group: All ranks, or None where there is only one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.share: PipelineShare | None = None
        self._group = group

    def by_norm(self, parameters: Sequence[Tensor], value: float) -> Tensor:
        """Scales gradients to a norm of at most ``value`` and returns the norm before."""
        return clip_by_norm(parameters, value, group=self._group, share=self.share)

    def by_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamps each element to [-value, value]."""
        clip_by_value(parameters, value)


def whole_world() -> dist.ProcessGroup:
    """Returns the group of all ranks, which have met."""
    world: dist.ProcessGroup | None = dist.group.WORLD
    assert world is not None, "the processes have met"
    return world


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Has the Trainer evaluate under no_grad: FSDP2 cannot train again with tensors made in inference mode."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def _agreed_seed(group: dist.ProcessGroup) -> int:
    """The seed of ``seed_everything``, or else rank 0's of torch, equal on all ranks."""
    given = os.environ.get("PL_GLOBAL_SEED")
    seeds = [int(given) if given is not None else torch.initial_seed()]
    if group.size() > 1:
        dist.broadcast_object_list(seeds, src=0, group=group)
    return seeds[0]
