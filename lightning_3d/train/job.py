"""One training job: build its parts, fit, test, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.compose import told_plainly
from lightning_3d.config.schema import RunConfig
from lightning_3d.errors import ConfigError, Lightning3DError, nearest
from lightning_3d.log import get_logger
from lightning_3d.strategy.launch.launcher import Mesh3DLauncher, single_job
from lightning_3d.train.prepare import SINGLE_STRATEGY, typed

_log = get_logger(__name__)


def train(cfg: DictConfig) -> float | None:
    """Fits a model and tests its best checkpoint, as configured.

    Args:
        cfg: A configuration that ``prepare`` has seen.

    Returns:
        The last value of ``optimized_metric``, equal on all ranks; None if no metric is named.

    Raises:
        ConfigError: No metric of that name was logged.
    """
    run: RunConfig = typed(cfg, RunConfig)
    # Interpolations know Hydra's job, which other processes such as data workers do not have.
    OmegaConf.resolve(cfg)
    _write_by_hydra_alone()
    with single_job():
        if run.seed is not None:
            seed_everything(run.seed, workers=True)
        data: LightningDataModule = instantiate(cfg.data)
        model: LightningModule = instantiate(cfg.model)
        trainer = _trainer(cfg)
        for logger in trainer.loggers:
            logger.log_hyperparams(OmegaConf.to_container(cfg))  # type: ignore[arg-type]  # resolved: a plain dict
        metrics: dict[str, torch.Tensor] = {}
        saved: dict[str, str] = {}
        if run.train:
            with told_plainly():
                trainer.fit(model, datamodule=data, ckpt_path=run.ckpt_path)
            metrics |= trainer.callback_metrics
            # Before the test, which gives the callbacks the state that they had when its checkpoint was written.
            saved = _saved(trainer)
        if run.test and is_overridden("test_step", model) and is_overridden("test_dataloader", data):
            checkpoint = next(iter(saved.values()), None) if run.train else run.ckpt_path
            trainer.test(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
            metrics |= trainer.callback_metrics
        if trainer.is_global_zero:
            _report(metrics, saved)
    return None if run.optimized_metric is None else _chosen(metrics, run.optimized_metric)


def _write_by_hydra_alone() -> None:
    """Has Hydra's handlers write what Lightning says, in every job of a sweep, and not Lightning's own as well."""
    if not logging.getLogger().handlers:
        return
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _trainer(cfg: DictConfig) -> Trainer:
    callbacks: list[Callback] = [instantiate(callback) for callback in cfg.callbacks.values() if callback]
    loggers: list[Logger] = [instantiate(logger) for logger in cfg.logger.values() if logger]
    if cfg.strategy.get("_target_") == SINGLE_STRATEGY and cfg.strategy.device is None:
        cfg.strategy.device = _only_device(cfg.trainer.accelerator)
    make = instantiate(cfg.trainer, _partial_=True)
    strategy = instantiate(cfg.strategy)
    try:
        trainer: Trainer = make(strategy=strategy, callbacks=callbacks, logger=loggers or False)
    except (ValueError, TypeError, MisconfigurationException) as error:
        if isinstance(error, Lightning3DError):
            raise
        no_device = "accelerator" in str(error).lower() or " gpu " in str(error).lower()
        fix = "trainer=cpu, or a machine that has them: lightning-3d doctor" if no_device else None
        raise ConfigError(f"trainer cannot be made: {error}", fix=fix) from error
    _launch_as_hydra_wants(trainer.strategy)
    return trainer


def _launch_as_hydra_wants(strategy: Strategy) -> None:
    """Gives a strategy of Lightning's our launcher: its own would start a whole sweep again on each rank."""
    launcher = strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        strategy._launcher = Mesh3DLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)


def _only_device(accelerator: str) -> str:
    return "cuda:0" if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available() else "cpu"


def _saved(trainer: Trainer) -> dict[str, str]:
    """Returns the best and the last checkpoint by these words, where there is one."""
    saver: Any = trainer.checkpoint_callback
    paths = {kind: str(getattr(saver, f"{kind}_model_path", "")) for kind in ("best", "last")}
    return {kind: path for kind, path in paths.items() if path}


def _report(metrics: Mapping[str, torch.Tensor], saved: Mapping[str, str]) -> None:
    for name in sorted(metrics):
        _log.info("%s %.4f", name, float(metrics[name]))
    for kind, path in saved.items():
        _log.info("%s checkpoint %s", kind, path)


def _chosen(metrics: Mapping[str, torch.Tensor], name: str) -> float:
    if name not in metrics:
        close = nearest(name, metrics)
        raise ConfigError(
            f"optimized_metric={name} was not logged",
            valid=sorted(metrics),
            fix=f"optimized_metric={close}" if close else None,
        )
    return float(metrics[name])
