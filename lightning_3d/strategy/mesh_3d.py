"""Mesh3DStrategy: Lightning's hooks in the order in which Lightning calls them, each a call downwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d import gradients
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import MeshError
from lightning_3d.initial.record import InitRecorder
from lightning_3d.log import get_logger, info_once
from lightning_3d.mesh.device import build_device_mesh, data_axis_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.apply import DataEngine
from lightning_3d.plan import Plan, apply_plan, attach_streams, make_plan
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.random.streams import RandomStreams
from lightning_3d.strategy.collectives import DataCollectives
from lightning_3d.strategy.launcher import Mesh3DLauncher
from lightning_3d.strategy.steps import StepRunner

_logger = get_logger(__name__)


class Mesh3DStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule on a data x pipeline x tensor mesh, with the numbers of one device.

    All arguments are keyword-only and plain values, so that Hydra and LightningCLI can build the strategy. Precision
    comes from ``Trainer(precision=...)``, or ``plugins=Mesh3DPrecision("bf16-master")``.

    Args:
        data_parallel_size: Degree of the data axis; ``"auto"`` = world / (pipeline x tensor).
        pipeline_parallel_size: Degree of the pipeline axis.
        tensor_parallel_size: Degree of the tensor axis.
        data_replicate_size: Replicas inside the data axis; each is cut in data / replicas shards (hybrid sharding).
        zero_stage: What is sharded over the data axis: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        unit_blocks: Blocks that gather and reduce together.
        cpu_offload: Keep shards and optimizer state in host memory.
        micro_batch_size: Samples per micro-batch and data rank.
        num_microbatches: Micro-batches per batch; ``"auto"`` follows from ``micro_batch_size``.
        pipeline_schedule: Order of micro-batches through the stages.
        stages_per_rank: Stages that one pipeline rank owns.
        layers_per_stage: Blocks of each stage; None = balanced by counted cost.
        pipeline_stack: Name, or list of names, of the module list that is cut into stages.
        sequence_parallel: Shard the sequence between tensor-parallel regions.
        tensor_plan: Styles of modules by glob, over those that are found.
        pad_vocabulary: Pad the vocabulary so that the tensor degree divides it.
        replay: Record blocks once and replay them.
        layout_free_random: Random streams per drawing module, so that dropout does not depend on the layout.
        tensor_random: ``"derived"`` streams per shard, or ``"exact"`` masks of one device.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        compile: Compile each block.
        uneven: At uneven ends of training data: ``"stop"`` all data ranks together, or ``"error"``.
        on_nonfinite: Non-finite gradients: ``"none"``, ``"skip"`` or ``"raise"``, one decision for the mesh.
        pretrained: Directory of weights that are streamed into the shards.
        pretrained_strict: Names in ``pretrained`` that match nothing are an error.
        rank_order: Order of the axes over the ranks, outermost first.
        save_distributed_checkpoint: Save a sharded directory; False = one consolidated file.
        async_save: Write checkpoints in the background.
        check_replicas: Compare what must be equal on several ranks.
        explain: Print the plan before training.
        process_group_backend: Backend of the process group; None = by device.
        timeout_seconds: Longest wait in a collective, in seconds.

    Raises:
        ConfigError: An option has an impossible value; all of them are listed.
    """

    strategy_name = "mesh_3d"

    def __init__(
        self,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_replicate_size: int = 1,
        zero_stage: int = 1,
        unit_blocks: int = 1,
        cpu_offload: bool = False,
        micro_batch_size: int | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_schedule: str = "1f1b",
        stages_per_rank: int | Literal["auto"] = "auto",
        layers_per_stage: list[int] | None = None,
        pipeline_stack: str | list[str] | None = None,
        sequence_parallel: bool = False,
        tensor_plan: dict[str, str] | None = None,
        pad_vocabulary: bool = False,
        replay: bool = True,
        layout_free_random: bool = True,
        tensor_random: str = "derived",
        activation_checkpointing: str = "none",
        compile: bool = False,
        uneven: str = "stop",
        on_nonfinite: str = "none",
        pretrained: str | None = None,
        pretrained_strict: bool = True,
        rank_order: str = "data,pipeline,tensor",
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        check_replicas: bool = False,
        explain: bool = False,
        process_group_backend: str | None = None,
        timeout_seconds: float = 300,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.config = StrategyConfig(**options).check()
        self.num_nodes = 1
        self._spec: MeshSpec | None = None
        self._mesh: DeviceMesh | None = None
        self._collectives: DataCollectives | None = None
        self._recorder: InitRecorder | None = None
        self._applied: AppliedModule | None = None
        self._runner: StepRunner | None = None
        self._ends = LoaderEnds()
        self._checkpoints = CheckpointDoor(distributed=save_distributed_checkpoint)
        super().__init__()
