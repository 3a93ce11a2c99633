"""The program: builds the parts of a run from its configuration, fits, tests the best checkpoint."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

_ROOT = Path(__file__).resolve().parents[1]
os.environ["PROJECT_ROOT"] = str(_ROOT)
sys.path.insert(0, str(_ROOT))

from digits.data import DigitsData  # noqa: E402 (this file may have been started by its path)


def train(cfg: DictConfig) -> tuple[dict[str, float], L.Trainer]:
    """Fits, and tests the best checkpoint."""
    L.seed_everything(cfg.seed, workers=True)
    datamodule = DigitsData(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in cfg.callbacks.values()]
    loggers = [hydra.utils.instantiate(logger) for logger in cfg.logger.values()]
    trainer: L.Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    for logger in trainer.loggers:
        logger.log_hyperparams({"model": OmegaConf.to_container(cfg.model, resolve=True), "seed": cfg.seed})
    metrics: dict[str, Any] = {}
    if cfg.train:
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
        metrics |= trainer.callback_metrics
    if cfg.test:
        best = trainer.checkpoint_callback.best_model_path or None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=best)
        metrics |= trainer.callback_metrics
    return {name: float(value) for name, value in metrics.items()}, trainer


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> float | None:
    """Runs one job."""
    metrics, trainer = train(cfg)
    returned = metrics[cfg.optimized_metric] if cfg.get("optimized_metric") else None
    seen = {
        "world": trainer.world_size,
        "directory": str(Path.cwd()),
        "overrides": list(HydraConfig.get().overrides.task),
        "rate": cfg.model.optimizer.lr,
        "best": trainer.checkpoint_callback.best_model_path,
        "epochs": trainer.current_epoch,
        "returned": returned,
        "metrics": metrics,
    }
    Path(cfg.paths.output_dir, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))
    return returned


if __name__ == "__main__":
    main()
