"""From a composed configuration to the training that a dry run plays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_3d.batches.peek import first_batch
from lightning_3d.config.batch import local_batch_size
from lightning_3d.config.precision import precision_of
from lightning_3d.config.schema import MESH_STRATEGY, StrategyConfig, strategy_options
from lightning_3d.dryrun.training import Training
from lightning_3d.errors import BatchError, ConfigError, MeshError
from lightning_3d.mesh.spec import AXIS_KEYS, Coordinate, MeshSpec
from lightning_3d.precision import PRECISIONS

_STEPS = 1000


def training_of(cfg: DictConfig) -> Training:
    """Returns the training that a configuration describes, with its first batch.

    The batch comes from ``mock_data`` if there is one, else from ``data``.

    Args:
        cfg: The composed configuration of a run.

    Raises:
        ConfigError: The strategy is another one, or the precision has no form on a mesh.
        MeshError: The degrees do not fit the world.
        BatchError: The data has no batch.
    """
    if cfg.strategy.get("_target_") != MESH_STRATEGY:
        raise ConfigError(
            f"strategy={cfg.strategy.get('_target_')} is played by nobody but its own processes.", valid=MESH_STRATEGY
        )
    config = StrategyConfig.from_mapping(strategy_options(cfg.strategy))
    mesh = _mesh(cfg, config)
    if cfg.batch.global_size is not None:
        cfg.batch.local_size = local_batch_size(cfg.batch.global_size, mesh.data)
    data: LightningDataModule = instantiate(cfg.mock_data or cfg.data)
    clip = cfg.trainer.get("gradient_clip_val")
    by_norm = cfg.trainer.get("gradient_clip_algorithm", "norm") == "norm"
    return Training(
        make=_maker(cfg),
        batch=_first_batch(data),
        mesh=mesh,
        config=config,
        precision=_precision(cfg),
        accumulate=int(cfg.trainer.get("accumulate_grad_batches", 1)),
        clip_norm=float(clip) if clip and by_norm else None,
        steps=cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else _STEPS,
        data=data,
    )


def coordinates_of(asked: Any, mesh: MeshSpec) -> tuple[Coordinate, ...] | None:
    """Returns the coordinates that a user asks for; None for those of the representative stages.

    Args:
        asked: None, ``[data, pipeline, tensor]``, a mapping with some of these keys, or a list of such.
        mesh: Degrees of the axes.

    Raises:
        ConfigError: It is something else.
        MeshError: A position lies outside of its axis.
    """
    if asked is None:
        return None
    found = OmegaConf.to_container(asked) if OmegaConf.is_config(asked) else asked
    rows = found if isinstance(found, list) and not all(isinstance(each, int) for each in found) else [found]
    return tuple(_coordinate(row, mesh) for row in rows)


def _coordinate(row: Any, mesh: MeshSpec) -> Coordinate:
    if isinstance(row, dict) and set(row) <= set(AXIS_KEYS):
        return mesh.at(**row)
    if isinstance(row, list) and len(row) == len(AXIS_KEYS) and all(isinstance(each, int) for each in row):
        return mesh.at(**dict(zip(AXIS_KEYS, row, strict=True)))
    raise ConfigError(
        f"coordinates: {row!r} is none.",
        valid="lists of three numbers, as [data, pipeline, tensor], or mappings such as {pipeline: 3}",
        fix="'coordinates=[[0,3,0]]'",
    )


def _mesh(cfg: DictConfig, config: StrategyConfig) -> MeshSpec:
    data = config.data_parallel_size
    model = config.pipeline_parallel_size * config.tensor_parallel_size
    # Nothing is started, so degrees that are all given need no devices.
    world = data * model if isinstance(data, int) else _world(cfg.trainer.devices, cfg.trainer.num_nodes)
    if world is None:
        raise MeshError(
            f"neither strategy.data_parallel_size=auto nor trainer.devices={cfg.trainer.devices} says how many ranks "
            "there are.",
            fix="strategy.data_parallel_size=16, or trainer.devices=8 trainer.num_nodes=64",
        )
    return MeshSpec.of(config, world)


def _world(devices: Any, nodes: int) -> int | None:
    if isinstance(devices, ListConfig):
        return len(devices) * nodes
    text = str(devices)
    return int(text) * nodes if text.isdigit() and int(text) > 0 else None


def _precision(cfg: DictConfig) -> str:
    precision = precision_of(cfg)
    if precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision={precision} has no form on a mesh.", valid=PRECISIONS)
    return precision


def _maker(cfg: DictConfig) -> Callable[[], LightningModule]:
    return partial(instantiate, cfg.model)


def _first_batch(data: LightningDataModule) -> Any:
    data.prepare_data()
    data.setup("fit")
    batch, _ = first_batch(data.train_dataloader())
    if batch is None:
        raise BatchError(
            "the data has no batch, and a dry run is given one.", fix="check the dataset and the batch size"
        )
    return batch
