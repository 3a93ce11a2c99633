"""What follows from the mesh, and what can be refused, before torch is imported and any process is started."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.config.batch import local_batch_size, num_microbatches
from lightning_3d.config.devices import asked_devices
from lightning_3d.config.schema import BatchConfig, RunConfig, mesh_options
from lightning_3d.errors import CheckpointError, ConfigError, nearest
from lightning_3d.mesh.spec import MeshSpec

SINGLE_STRATEGY = "lightning.pytorch.strategies.SingleDeviceStrategy"

Schema = TypeVar("Schema", RunConfig, BatchConfig)

# Lightning's own words for a checkpoint that it finds itself.
_FOUND_BY_LIGHTNING = ("best", "hpc", "registry")
# Ours: the newest of all runs of the task. Lightning would look in the directory of the run that just begins.
_LAST = "last"
# What a launcher of several nodes sets, or a person in its place.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "LSB_JOBID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def prepare(cfg: DictConfig) -> RunConfig:
    """Fills in what follows from the number of processes, and refuses what cannot run on them.

    Args:
        cfg: The composed configuration; ``batch.local_size`` is written, ``ckpt_path`` made absolute, and
            ``trainer.devices`` written where torchrun or the strategy decides it.

    Returns:
        The part of the configuration that is about the job itself.

    Raises:
        Lightning3DError: An option, a degree, a batch size, a path or a ``_target_`` is impossible.
    """
    run = typed(cfg, RunConfig)
    runs = Path(OmegaConf.select(cfg, "paths.log_dir", default="logs")) / run.task_name
    run.ckpt_path = cfg.ckpt_path = _newest(runs) if run.ckpt_path == _LAST else _found_checkpoint(run.ckpt_path)
    options = mesh_options(cfg.strategy)
    world = _world(cfg)
    spec = MeshSpec.resolve(world) if options is None else MeshSpec.of(options, world)
    batch = typed(cfg.get("batch", OmegaConf.create()), BatchConfig)
    if batch.global_size is not None:
        local = local_batch_size(batch.global_size, spec.data)
        if batch.local_size not in (None, local):
            raise ConfigError(
                f"batch.local_size={batch.local_size} does not follow from batch.global_size={batch.global_size} and "
                f"{spec.data} data ranks",
                valid=f"{local}, which is filled in when it is left null",
            )
        cfg.batch.local_size = local
        if options is not None:
            num_microbatches(
                local,
                micro_batch_size=options.micro_batch_size,
                requested=options.num_microbatches,
                pipeline=spec.pipeline,
            )
    for key, target in _targets(cfg):
        _check_target(key, target)
    return run


def typed(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """Returns the keys of ``cfg`` that ``schema`` has, as an instance of it.

    Raises:
        ConfigError: A value has the wrong type.
    """
    names = [field.name for field in fields(schema) if field.name in cfg]
    try:
        values = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.masked_copy(cfg, names)))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error.msg or error)) from error
    assert isinstance(values, schema)
    return values


def _found_checkpoint(path: str | None) -> str | None:
    if path is None or path in _FOUND_BY_LIGHTNING or "://" in path:
        return path
    if Path(path).exists():
        return str(Path(path).absolute())
    raise CheckpointError(
        f"ckpt_path={path} does not exist, seen from {Path.cwd()}",
        valid=f"the path of a checkpoint, or one of {', '.join((_LAST, *_FOUND_BY_LIGHTNING))}",
    )


def _newest(runs: Path) -> str:
    """The last checkpoint of the task's run that saved last, which may be one that a signal has asked for."""
    found = [path for name in ("last.ckpt", "sigterm-step=*.ckpt") for path in runs.rglob(f"checkpoints/{name}")]
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise CheckpointError(
            f"ckpt_path=last finds no checkpoints/last.ckpt or checkpoints/sigterm-step=*.ckpt below {runs.absolute()}",
            fix="ckpt_path=PATH, or the task_name and paths.log_dir of the run to resume",
        )
    return str(found[-1].absolute())


def _world(cfg: DictConfig) -> int:
    """Returns the number of processes of the job, and makes the trainer agree with it."""
    trainer = cfg.trainer
    if cfg.strategy.get("_target_") == SINGLE_STRATEGY:
        trainer.devices, trainer.num_nodes = 1, 1
        return 1
    started = _Started.by_torchrun()
    if started and trainer.devices == "auto":
        trainer.devices, trainer.num_nodes = started.local, started.nodes
    asked, nodes = asked_devices(trainer.devices), int(trainer.num_nodes)
    devices = asked or (1 if trainer.accelerator == "cpu" else _visible_gpus())
    if started and devices * nodes != started.world:
        raise ConfigError(
            f"torchrun started {started.world} processes, {started.local} of them on this node, but "
            f"trainer.devices={devices} x trainer.num_nodes={nodes} asks for {devices * nodes}",
            fix=f"trainer.devices={started.local} trainer.num_nodes={started.nodes}, or trainer.devices=auto",
        )
    if nodes > 1 and not started and not any(name in os.environ for name in _NODE_VARIABLES):
        raise ConfigError(
            f"trainer.num_nodes={nodes}, but nothing says which node this is: it would wait for the others forever",
            fix=f"torchrun --nnodes {nodes} ... -m lightning_3d train ..., or srun, or trainer.num_nodes=1",
        )
    return devices * nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """The processes that torchrun has started already."""

    world: int
    local: int

    @property
    def nodes(self) -> int:
        return self.world // self.local

    @classmethod
    def by_torchrun(cls) -> _Started | None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        return cls(world=int(os.environ["WORLD_SIZE"]), local=int(os.environ["LOCAL_WORLD_SIZE"]))


def _visible_gpus() -> int:
    # Only this question needs torch, and torch takes seconds to import.
    from lightning.pytorch.accelerators import CUDAAccelerator

    return max(1, CUDAAccelerator.auto_device_count())


def _targets(node: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields every ``_target_`` below a node, with the dotted key that holds it."""
    if isinstance(node, DictConfig):
        for name in node:
            if name == "_target_":
                yield f"{key}._target_".lstrip("."), str(node[name])
            elif not OmegaConf.is_missing(node, name):
                yield from _targets(node[name], f"{key}.{name!s}".lstrip("."))
    elif isinstance(node, ListConfig):
        for index, entry in enumerate(node):
            yield from _targets(entry, f"{key}[{index}]")


def _check_target(key: str, target: str) -> None:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={target} cannot be imported: {type(error).__name__}: {error}", fix=_importable(target)
        ) from error


def _importable(target: str) -> str:
    module, _, name = target.rpartition(".")
    try:
        close = nearest(name, dir(pkgutil.resolve_name(module)))
    except (ImportError, AttributeError, ValueError):
        return f"run in the directory that holds {target.partition('.')[0]}, or put it on PYTHONPATH"
    return f"{module}.{close}" if close else f"define {name} in {module}"
