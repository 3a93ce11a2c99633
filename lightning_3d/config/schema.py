"""Every option of a run with its type, default and the values it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.rules import (
    AUTO_COUNT,
    AXIS_ORDER,
    COUNT,
    COUNTS,
    FLAG,
    NAMES,
    SECONDS,
    STYLES,
    TEXT,
    did_you_mean,
    integer,
    one_of,
    or_null,
)
from lightning_3d.errors import ConfigError

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
NEW_PROGRAMS, IN_NOTEBOOKS = "popen", "fork"
START_METHODS = (NEW_PROGRAMS, "spawn", IN_NOTEBOOKS, "forkserver")
V_SCHEDULES = ("zbvzerobubble", "dualpipev")
SCHEDULES = (*ONE_STAGE_SCHEDULES, "loopedbfs", "interleaved1f1b", "interleavedzerobubble", *V_SCHEDULES)

# The ``_target_`` of the strategy that has a mesh.
MESH_STRATEGY = "lightning_3d.Mesh3DStrategy"


@dataclass
class StrategyConfig:
    """The arguments of ``Mesh3DStrategy``; the same names stand in Python, YAML and on the command line.

    Mutable, and of types that OmegaConf knows, because overrides must be able to edit it.

    Attributes:
        data_parallel_size: Degree of the data axis; "auto" = world / (pipeline x tensor).
        pipeline_parallel_size: Degree of the pipeline axis.
        tensor_parallel_size: Degree of the tensor axis.
        data_replicate_size: Replicas inside the data axis; each replica is cut in data / replicas shards.
        zero_stage: What is sharded over the data axis: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters.
        unit_blocks: Blocks per shard unit.
        cpu_offload: Keep shards and optimizer state in host memory.
        micro_batch_size: Samples per micro-batch and data rank.
        num_microbatches: Micro-batches per batch; "auto" follows from micro_batch_size and the pipeline degree.
        pipeline_schedule: Name of the schedule, one of ``SCHEDULES``.
        stages_per_rank: Stages that one pipeline rank owns; "auto" = what the schedule needs.
        layers_per_stage: Blocks of each stage in model order; None = balanced by counted cost.
        pipeline_stack: Name, or list of names, of the module list that is cut.
        sequence_parallel: Shard the sequence between the tensor-parallel regions.
        tensor_plan: Styles of modules by glob, over those that are found.
        pad_vocabulary: Pad the vocabulary so that the tensor degree divides it.
        replay: Record blocks once and replay them.
        layout_free_random: Random streams per drawing module, so that dropout does not depend on the layout.
        tensor_random: "derived" streams per shard, or "exact" masks of one device.
        activation_checkpointing: "none", "selective" (attention core) or "full" (each block).
        compile: Compile each block; on the tensor axis what was recorded of it.
        uneven: At uneven ends of training data: "stop" all data ranks together, or "error".
        on_nonfinite: Losses and gradients that are not finite: "none", "skip" or "raise".
        pretrained: Directory of weights that are streamed into the shards.
        pretrained_strict: Names in ``pretrained`` that match nothing are an error.
        rank_order: Order of the axes over the ranks, outermost first.
        save_distributed_checkpoint: Save a sharded directory; False = one consolidated file.
        async_save: Write checkpoints in the background.
        check_replicas: Compare what must be equal on several ranks.
        explain: Print the plan before training.
        start_method: "popen" starts the program again for each rank; "spawn", "fork" and "forkserver" start processes
            from this one, as in DDPStrategy; "auto" = "fork" in a notebook, else "popen".
        process_group_backend: Backend of the process group; None = by device.
        timeout_seconds: Longest wait in a collective, in seconds.
    """

    data_parallel_size: int | str = field(default="auto", metadata={"rule": AUTO_COUNT})
    pipeline_parallel_size: int = field(default=1, metadata={"rule": COUNT})
    tensor_parallel_size: int = field(default=1, metadata={"rule": COUNT})
    data_replicate_size: int = field(default=1, metadata={"rule": COUNT})
    zero_stage: int = field(default=1, metadata={"rule": integer(0, 3)})
    unit_blocks: int = field(default=1, metadata={"rule": COUNT})
    cpu_offload: bool = field(default=False, metadata={"rule": FLAG})
    micro_batch_size: int | None = field(default=None, metadata={"rule": or_null(COUNT)})
    num_microbatches: int | str = field(default="auto", metadata={"rule": AUTO_COUNT})
    pipeline_schedule: str = field(default="1f1b", metadata={"rule": one_of(*SCHEDULES)})
    stages_per_rank: int | str = field(default="auto", metadata={"rule": AUTO_COUNT})
    layers_per_stage: list[int] | None = field(default=None, metadata={"rule": or_null(COUNTS)})
    pipeline_stack: Any = field(default=None, metadata={"rule": or_null(NAMES)})
    sequence_parallel: bool = field(default=False, metadata={"rule": FLAG})
    tensor_plan: dict[str, str] | None = field(default=None, metadata={"rule": or_null(STYLES)})
    pad_vocabulary: bool = field(default=False, metadata={"rule": FLAG})
    replay: bool = field(default=True, metadata={"rule": FLAG})
    layout_free_random: bool = field(default=True, metadata={"rule": FLAG})
    tensor_random: str = field(default="derived", metadata={"rule": one_of("derived", "exact")})
    activation_checkpointing: str = field(default="none", metadata={"rule": one_of("none", "selective", "full")})
    compile: bool = field(default=False, metadata={"rule": FLAG})
    uneven: str = field(default="stop", metadata={"rule": one_of("stop", "error")})
    on_nonfinite: str = field(default="none", metadata={"rule": one_of("none", "skip", "raise")})
    pretrained: str | None = field(default=None, metadata={"rule": or_null(TEXT)})
    pretrained_strict: bool = field(default=True, metadata={"rule": FLAG})
    rank_order: str = field(default="data,pipeline,tensor", metadata={"rule": AXIS_ORDER})
    save_distributed_checkpoint: bool = field(default=True, metadata={"rule": FLAG})
    async_save: bool = field(default=False, metadata={"rule": FLAG})
    check_replicas: bool = field(default=False, metadata={"rule": FLAG})
    explain: bool = field(default=False, metadata={"rule": FLAG})
    start_method: str = field(default="auto", metadata={"rule": one_of("auto", *START_METHODS)})
    process_group_backend: str | None = field(default=None, metadata={"rule": or_null(TEXT)})
    timeout_seconds: float = field(default=300, metadata={"rule": SECONDS})

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            # Hydra gives its own kinds of lists and mappings, unless asked to convert them.
            if OmegaConf.is_config(value):
                setattr(self, option.name, OmegaConf.to_container(value, resolve=True))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StrategyConfig:
        """Returns the checked options of ``values``.

        Raises:
            ConfigError: A name is unknown, or a value is not one that its option may take.
        """
        known = [option.name for option in fields(cls)]
        unknown = [f"{name} does not exist{did_you_mean(name, known)}" for name in values if name not in known]
        config = cls(**{name: value for name, value in values.items() if name in known})
        _refuse(unknown + config.problems())
        return config

    def check(self) -> StrategyConfig:
        """Returns the options themselves, once every value has proved possible.

        Raises:
            ConfigError: Some values are not; all of them are listed.
        """
        _refuse(self.problems())
        return self

    def problems(self) -> list[str]:
        """Returns one line for every value that is not possible: what is wrong, and what would be accepted."""
        values = [(option.name, getattr(self, option.name), option.metadata["rule"]) for option in fields(self)]
        wrong = [rule.complaint(name, value) for name, value, rule in values if not rule.accepts(value)]
        return wrong or [*self._shard_conflicts(), *self._stage_conflicts()]

    def stages_of_a_rank(self) -> int:
        """Returns ``stages_per_rank`` as a number: "auto" is 1 for gpipe and 1f1b, 2 for the other schedules."""
        if isinstance(self.stages_per_rank, int):
            return self.stages_per_rank
        return 1 if self.pipeline_schedule in ONE_STAGE_SCHEDULES else 2

    def _shard_conflicts(self) -> list[str]:
        found: list[str] = []
        data, replicas = self.data_parallel_size, self.data_replicate_size
        if isinstance(data, int) and data % replicas:
            valid = ", ".join(str(size) for size in range(1, data + 1) if data % size == 0)
            found.append(f"data_replicate_size={replicas} must divide data_parallel_size={data}, so one of {valid}")
        if self.zero_stage == 0 and replicas > 1:
            found.append(f"data_replicate_size={replicas} needs shards, so zero_stage 1, 2 or 3 instead of 0")
        if self.zero_stage == 0 and self.cpu_offload:
            found.append("cpu_offload=True needs shards, so zero_stage 1, 2 or 3 instead of 0")
        if self.compile and self.tensor_parallel_size > 1 and not self.replay:
            found.append("compile=True compiles replayed blocks at tensor_parallel_size above 1: it needs replay=True")
        if self.async_save and not self.save_distributed_checkpoint:
            found.append("async_save=True needs save_distributed_checkpoint=True")
        if self.pretrained is None and not self.pretrained_strict:
            found.append("pretrained_strict=False is about pretrained=DIR, which is not given")
        return found

    def _stage_conflicts(self) -> list[str]:
        found: list[str] = []
        schedule, per_rank = self.pipeline_schedule, self.stages_of_a_rank()
        if schedule in ONE_STAGE_SCHEDULES and per_rank != 1:
            found.append(f"stages_per_rank={per_rank} must be 1 with pipeline_schedule={schedule}")
        if schedule in V_SCHEDULES and per_rank != 2:
            found.append(f"stages_per_rank={per_rank} must be 2 with pipeline_schedule={schedule}")
        if schedule not in (*ONE_STAGE_SCHEDULES, *V_SCHEDULES) and per_rank < 2:
            found.append(f"stages_per_rank={per_rank} must be 2 or more with pipeline_schedule={schedule}")
        if self.pipeline_parallel_size > 1 and not self.layout_free_random:
            found.append("layout_free_random=False would draw other numbers on each stage: leave it True in a pipeline")
        stages = self.pipeline_parallel_size * per_rank
        if self.layers_per_stage is not None and len(self.layers_per_stage) != stages:
            count = len(self.layers_per_stage)
            found.append(f"layers_per_stage has {count} entries, must have {stages}, one for each stage")
        return found


@dataclass
class BatchConfig:
    """How many samples make one training step, whatever the mesh.

    Attributes:
        global_size: Samples of one batch over all data ranks; None if the data module has its own way.
        micro_size: Samples of one micro-batch on one data rank; None leaves the choice to the strategy.
        local_size: Samples of one batch on one data rank; derived, never set by hand.
    """

    global_size: int | None = None
    micro_size: int | None = None
    local_size: int | None = None


@dataclass
class RunConfig:
    """What one training job does around its Trainer.

    Attributes:
        task_name: Name of the job; part of its output directory.
        seed: Seed of every generator; None leaves them alone.
        train: Fit the model.
        test: Test the best checkpoint of the fit, or ``ckpt_path`` without a fit.
        explain: Print the plan before training.
        ckpt_path: Checkpoint to resume from.
        optimized_metric: Name of the logged metric that the job returns to a sweeper.
    """

    task_name: str = "train"
    seed: int | None = 0
    train: bool = True
    test: bool = True
    explain: bool = False
    ckpt_path: str | None = None
    optimized_metric: str | None = None


def _refuse(problems: list[str]) -> None:
    if not problems:
        return
    many = len(problems) > 1
    listed = "".join(f"\n  - {problem}" for problem in problems) if many else f" {problems[0]}"
    raise ConfigError(f"impossible option{'s' if many else ''} of Mesh3DStrategy:{listed}")


def strategy_options(strategy: DictConfig) -> dict[str, Any]:
    """Returns the options in a configuration's node of the strategy, without Hydra's own keys."""
    values = OmegaConf.to_container(strategy, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items() if not str(name).startswith("_")}
