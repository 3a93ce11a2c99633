"""From a composed configuration to what the planner is asked: the model, the cluster, the batch, the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.batch import local_batch_size, num_microbatches
from lightning_3d.config.devices import asked_devices
from lightning_3d.config.precision import precision_of
from lightning_3d.config.rules import did_you_mean
from lightning_3d.config.schema import KEPT_KINDS, SCHEDULES, StrategyConfig, mesh_options, needed_mesh_options
from lightning_3d.errors import BatchError, ConfigError, Lightning3DError, MeshError
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.obstacle import batch_obstacle
from lightning_3d.planner.search import Space
from lightning_3d.planner.shapes import BatchShape, DecoderShape, MeshShape
from lightning_3d.units import counted

_GPT, _LLAMA = "lightning_3d.reference.gpt.GPT", "lightning_3d.reference.llama.Llama"
RECIPES: Mapping[str, str] = MappingProxyType(
    {
        "32-true": "fp32",
        "64-true": "fp64",
        "bf16-true": "pure_bf16",
        "16-true": "pure_bf16",
        "bf16-mixed": "autocast",
        "16-mixed": "autocast",
        "bf16-master": "bf16_master",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the planner is asked.

    Attributes:
        name: Of the run.
        shape: The model, if it is one of the reference decoders.
        cluster: The cluster.
        devices: Devices to use.
        bytes_recipe: Name of the recipe of bytes per parameter.
        space: What the search may vary.
        accumulate: Batches that the configuration makes of a step's samples.
        given: The mesh of the configuration; None if its strategy has none, or it is impossible.
        pads_vocabulary: The configuration pads a vocabulary that its tensor ranks do not divide, as prices assume.
        problem: Why the mesh of the configuration is impossible, whatever the model.
        evaluate: Price the given mesh alone.
        top: How many meshes to show.
        trial: Of how many of them to run real steps.
        picture: Where a picture is written.
        trainer_devices: Devices that a training of this configuration would take; None if it takes what there is.
    """

    name: str
    shape: DecoderShape | None
    cluster: Cluster
    devices: int
    bytes_recipe: str
    space: Space
    accumulate: int
    given: Case | None
    pads_vocabulary: bool
    problem: Lightning3DError | None
    evaluate: bool
    top: int
    trial: int
    picture: str | None
    trainer_devices: int | None


def read_request(cfg: DictConfig) -> Request:
    """Returns what a configuration asks.

    Args:
        cfg: The composed configuration of the verb.

    Raises:
        Lightning3DError: A part of it is missing or impossible.
    """
    cluster = Cluster.from_mapping(_plain(cfg.cluster))
    devices = cluster.devices if cfg.num_devices is None else int(cfg.num_devices)
    size = cfg.batch.global_size
    if size is None:
        raise ConfigError("a plan needs the samples of a step.", fix="batch.global_size=256")
    accumulate = int(OmegaConf.select(cfg, "trainer.accumulate_grad_batches", default=1))
    given: Case | None = None
    problem: Lightning3DError | None = None
    try:
        given = _given(cfg, cluster, devices, size, accumulate)
    except (MeshError, BatchError) as error:
        # The search answers all the same.
        if cfg.evaluate:
            raise
        problem = error
    return Request(
        name=str(cfg.task_name),
        shape=decoder_of(cfg),
        cluster=cluster,
        devices=devices,
        bytes_recipe=cfg.bytes_recipe or recipe_of(cfg),
        space=_space(cfg, size * accumulate),
        accumulate=accumulate,
        given=given,
        pads_vocabulary=bool(OmegaConf.select(cfg, "strategy.pad_vocabulary")),
        problem=problem,
        evaluate=bool(cfg.evaluate),
        top=int(cfg.top),
        trial=int(cfg.trial),
        picture=cfg.picture,
        trainer_devices=_trainer_devices(cfg),
    )


def _trainer_devices(cfg: DictConfig) -> int | None:
    """What a training would take; None if it takes what there is."""
    devices = asked_devices(cfg.trainer.devices)
    return devices and devices * int(cfg.trainer.num_nodes)


def decoder_of(cfg: DictConfig) -> DecoderShape | None:
    """Returns the shape of the model if it is one of the reference decoders.

    Args:
        cfg: The composed configuration.
    """
    model = OmegaConf.select(cfg, "model.model")
    target = None if model is None else model.get("_target_")
    if target not in (_GPT, _LLAMA):
        return None
    hidden, heads, length = int(model.hidden_size), int(model.num_heads), int(model.max_length)
    gated = target == _LLAMA
    return DecoderShape(
        layers=int(model.num_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(model.get("num_kv_heads") or heads),
        ffn_hidden=int(model.get("intermediate_size") or 4 * hidden),
        vocab=int(model.vocab_size),
        sequence=int(OmegaConf.select(cfg, "data.length", default=length)),
        gated=gated,
        tied=bool(model.tie_weights),
        positions=0 if gated else length,
    )


def recipe_of(cfg: DictConfig) -> str:
    """Returns the recipe of bytes of the trainer's precision.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigError: The precision is unknown.
    """
    precision = precision_of(cfg)
    if precision not in RECIPES:
        raise ConfigError(f"trainer.precision={precision} has no recipe of bytes.", valid=RECIPES)
    return RECIPES[precision]


def _space(cfg: DictConfig, size: int) -> Space:
    space = cfg.space
    return Space(
        global_size=size,
        micro_sizes=tuple(2**power for power in range(20) if 2**power <= int(space.largest_micro_size)),
        zero_stages=tuple(int(stage) for stage in space.zero_stages),
        kinds=_words(space, "activation_checkpointing", KEPT_KINDS),
        schedules=_words(space, "schedules", SCHEDULES),
        sequence_parallel=bool(space.sequence_parallel),
        largest_tensor=space.largest_tensor,
    )


def _words(space: DictConfig, key: str, known: Sequence[str]) -> tuple[str, ...]:
    """The words of a list, each of which is known: prices of others would be those of something else."""
    words = tuple(str(word) for word in space[key])
    unknown = [f"{word!r} does not exist{did_you_mean(word, known)}" for word in words if word not in known]
    if unknown:
        raise ConfigError(f"space.{key}: {', '.join(unknown)}.", valid=known)
    return words


def _given(cfg: DictConfig, cluster: Cluster, devices: int, size: int, accumulate: int) -> Case | None:
    """The mesh of the configuration on these devices; None if it is of another strategy."""
    options = needed_mesh_options(cfg.strategy, "to evaluate") if cfg.evaluate else mesh_options(cfg.strategy)
    if options is None:
        return None
    spec = _spec(options, cluster, devices)
    mesh = mesh_shape(options, spec)
    # Each batch is cut into micro-batches for itself.
    local = local_batch_size(size, spec.data)
    count = num_microbatches(
        local,
        micro_batch_size=options.micro_batch_size,
        requested=options.num_microbatches,
        pipeline=spec.pipeline,
    )
    batch = BatchShape(global_size=size, micro_size=-(-local // count))
    unequal = batch_obstacle(batch, spec.data)
    if unequal is not None:
        raise unequal.error()
    step = replace(batch, global_size=size * accumulate)
    return Case.checked(mesh, step, options.pipeline_schedule, options.activation_checkpointing)


def _spec(options: StrategyConfig, cluster: Cluster, devices: int) -> MeshSpec:
    """The mesh: its data axis takes all devices that the other axes leave, or as many ranks as it is told."""
    data, others = options.data_parallel_size, options.pipeline_parallel_size * options.tensor_parallel_size
    ranks = data * others if isinstance(data, int) else max(1, devices // others) * others
    if ranks > devices:
        name = f"{'' if isinstance(data, int) else 'at least '}{ranks} ranks"
        raise MeshError(
            f"the mesh has {name} (pipeline {options.pipeline_parallel_size} x tensor {options.tensor_parallel_size} x "
            f"data {data}), but {counted(devices, 'device')} of cluster {cluster.name} are to be used.",
            valid=f"at most {counted(devices, 'rank')}",
            fix=f"num_devices=null cluster.nodes={-(-ranks // cluster.devices_per_node)}",
        )
    if not isinstance(data, int) and ranks != devices:
        raise MeshError(
            f"pipeline {options.pipeline_parallel_size} x tensor {options.tensor_parallel_size} does not divide the "
            f"{counted(devices, 'device')} to be used of cluster {cluster.name}.",
            valid=f"a product that divides {devices}",
            fix=f"num_devices={ranks}",
        )
    return MeshSpec.of(options, ranks)


def mesh_shape(options: StrategyConfig, spec: MeshSpec) -> MeshShape:
    """Returns the mesh of a strategy as the planner takes it.

    Args:
        options: The strategy's options.
        spec: Degrees of the axes.
    """
    layers = options.layers_per_stage
    return MeshShape(
        data_parallel_size=spec.data,
        data_replicate_size=spec.data_replicate,
        pipeline_parallel_size=spec.pipeline,
        tensor_parallel_size=spec.tensor,
        zero_stage=options.zero_stage,
        stages_per_rank=options.stages_of_a_rank(),
        sequence_parallel=options.sequence_parallel,
        layers_per_stage=tuple(layers) if layers else None,
        rank_order=options.rank_order,
    )


def _plain(cfg: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
