"""From a composed configuration to the training that a dry run plays."""

from __future__ import annotations

from functools import partial
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig

from lightning_3d.batches.peek import first_batch
from lightning_3d.config.batch import local_batch_size
from lightning_3d.config.precision import precision_of
from lightning_3d.dryrun.asked import mesh_of
from lightning_3d.dryrun.training import Training
from lightning_3d.errors import BatchError, ConfigError
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
    config, mesh = mesh_of(cfg)
    if cfg.batch.global_size is not None:
        cfg.batch.local_size = local_batch_size(cfg.batch.global_size, mesh.data)
    data: LightningDataModule = instantiate(cfg.mock_data or cfg.data)
    clip = cfg.trainer.get("gradient_clip_val")
    by_norm = cfg.trainer.get("gradient_clip_algorithm", "norm") == "norm"
    return Training(
        make=partial(instantiate, cfg.model),
        batch=_first_batch(data),
        mesh=mesh,
        config=config,
        precision=_precision(cfg),
        accumulate=int(cfg.trainer.get("accumulate_grad_batches", 1)),
        clip_norm=float(clip) if clip and by_norm else None,
        steps=cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else _STEPS,
        data=data,
    )


def _precision(cfg: DictConfig) -> str:
    precision = precision_of(cfg)
    if precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision={precision} has no form on a mesh.", valid=PRECISIONS)
    return precision


def _first_batch(data: LightningDataModule) -> Any:
    data.prepare_data()
    data.setup("fit")
    batch, _ = first_batch(data.train_dataloader())
    if batch is None:
        raise BatchError(
            "the data has no batch, and a dry run is given one.", fix="check the dataset and the batch size"
        )
    return batch
