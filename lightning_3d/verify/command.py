"""The verb ``verify``: from a configuration to a certificate on the screen and in the run's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.batch import local_batch_size
from lightning_3d.config.compose import run_hydra
from lightning_3d.config.devices import asked_devices, smallest_world
from lightning_3d.config.schema import needed_mesh_options
from lightning_3d.config.search import importable_here
from lightning_3d.errors import ConfigError
from lightning_3d.mesh.spec import MeshSpec

_CONFIG = "verify"
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")


def run(arguments: Sequence[str]) -> int:
    """Verifies what a command line configures.

    Args:
        arguments: Hydra's flags and overrides, without the verb.

    Returns:
        0 if everything is equal, else 1.

    Raises:
        Lightning3DError: The configuration is impossible, or the mesh refuses the module.
    """
    launched = [name for name in _LAUNCHED if name in os.environ]
    if launched:
        raise ConfigError(
            f"verify starts its processes itself, but a launcher has started this one: {', '.join(launched)} is set",
            fix="lightning-3d verify ... on one machine, without torchrun or srun",
        )
    verdicts: list[bool] = []
    with importable_here():
        run_hydra(lambda cfg: verdicts.append(_verified(cfg)), arguments, config_name=_CONFIG)
    return int(not all(verdicts))


def _verified(cfg: DictConfig) -> bool:
    prepared = _prepare(cfg)
    # A misspelt key should not wait for torch to be imported.
    from lightning_3d.verify.runs import Request
    from lightning_3d.verify.subject import ConfiguredSubject
    from lightning_3d.verify.verifier import TRAINER_OPTIONS, certify

    options, mesh = prepared
    seed = 0 if cfg.seed is None else int(cfg.seed)
    parts = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("model", "data")}
    request = Request(
        subject=ConfiguredSubject(parts, seed),
        layers=cfg.layers,
        options={**options, "data_parallel_size": mesh.data},
        world=mesh.world,
        steps=int(cfg.steps),
        trainer={name: cfg.trainer[name] for name in TRAINER_OPTIONS if cfg.trainer.get(name) is not None},
        seed=seed,
        seconds=float(cfg.seconds),
        preload=tuple(dict.fromkeys(_modules(parts))),
    )
    certificate = certify(request, str(cfg.precision))
    print(certificate)
    for path in certificate.write(Path(cfg.paths.output_dir)):
        print(f"{'written':<16}{path}")
    return certificate.equal


def _prepare(cfg: DictConfig) -> tuple[dict[str, Any], MeshSpec]:
    """Fills in what follows from the mesh, and returns the strategy's options and the mesh."""
    config = needed_mesh_options(cfg.strategy, "to compare with one device")
    asked = asked_devices(cfg.trainer.devices)
    mesh = MeshSpec.of(config, smallest_world(config, 2) if asked is None else asked * int(cfg.trainer.num_nodes))
    batch = cfg.get("batch")
    if batch is not None and batch.get("global_size") is not None:
        batch.local_size = local_batch_size(int(batch.global_size), mesh.data)
    # Told by the certificate.
    return {**asdict(config), "explain": False}, mesh


def _modules(node: Any) -> Iterator[str]:
    """The modules of all classes that a configuration names."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"].rpartition(".")[0]
        for value in node.values():
            yield from _modules(value)
