"""What a dry run is asked for, before torch is imported: the mesh, and ranks on it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.devices import asked_devices, smallest_world
from lightning_3d.config.schema import StrategyConfig, needed_mesh_options
from lightning_3d.errors import ConfigError, MeshError
from lightning_3d.mesh.spec import AXIS_KEYS, Coordinate, MeshSpec


def mesh_of(cfg: DictConfig) -> tuple[StrategyConfig, MeshSpec]:
    """Returns the strategy's options and the mesh of a composed configuration.

    Args:
        cfg: The composed configuration of a run.

    Raises:
        ConfigError: The strategy is another one, or an option has an impossible value.
        MeshError: The degrees do not fit the world.
    """
    config = needed_mesh_options(cfg.strategy, "whose ranks could be played")
    return config, _mesh(cfg, config)


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
    # Nothing is started, so degrees that are all given need no devices.
    if isinstance(config.data_parallel_size, int):
        return MeshSpec.of(config, smallest_world(config))
    devices = asked_devices(cfg.trainer.devices)
    if devices is None:
        raise MeshError(
            f"neither strategy.data_parallel_size=auto nor trainer.devices={cfg.trainer.devices} says how many ranks "
            "there are.",
            fix="strategy.data_parallel_size=16, or trainer.devices=8 trainer.num_nodes=64",
        )
    return MeshSpec.of(config, devices * int(cfg.trainer.num_nodes))
