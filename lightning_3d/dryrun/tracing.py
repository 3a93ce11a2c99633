"""The verb ``plan`` for any module: what no formula knows is traced, as a dry run would run it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.compose import command_words, composed, readable_errors, told_plainly
from lightning_3d.config.schema import MESH_STRATEGY, mesh_options
from lightning_3d.config.search import importable_here
from lightning_3d.log import told_if_slow

if TYPE_CHECKING:
    from lightning_3d.planner.model import ModelGraph

_JSON = "--json"


def plan(arguments: Sequence[str]) -> int:
    """Plans as a command line asks.

    Args:
        arguments: Hydra's overrides without the verb; ``--json`` prints plain data, ``--config-dir DIR`` adds a
            directory of configuration, ``--cfg job`` shows the configuration alone.

    Returns:
        0 if a mesh was found or priced, 1 if nothing fits.

    Raises:
        Lightning3DError: The configuration is impossible.
    """
    arguments = ["json=true" if word == _JSON else word for word in arguments]
    cfg = composed(arguments, "plan")
    if cfg is None:
        return 0
    mesh_options(cfg.strategy)
    words, directory, _ = command_words(arguments)
    # Schedules are torch's own; what is misspelt should not wait for it to be imported.
    from lightning_3d.planner.command import run

    with importable_here(), readable_errors(), told_plainly():
        return run(cfg, words, directory, trace=model_of)


def price_of(cfg: DictConfig) -> ModelGraph:
    """Returns the price of a configuration's module: by formulas if it is a reference decoder, else traced.

    Args:
        cfg: The composed configuration.

    Raises:
        Lightning3DError: The module cannot be built or its step cannot be run without values.
    """
    from lightning_3d.planner.decoder import decoder_model
    from lightning_3d.planner.request import decoder_of

    shape = decoder_of(cfg)
    return model_of(cfg) if shape is None else decoder_model(shape)


def model_of(cfg: DictConfig) -> ModelGraph:
    """Returns the price of a configuration's module, traced with one sample in 16 bit on one rank.

    Args:
        cfg: The composed configuration.

    Raises:
        Lightning3DError: The module cannot be built or its step cannot be run without values.
    """
    # Plans of reference decoders need no torch.
    from lightning_3d.dryrun.setup import training_of
    from lightning_3d.plan.traced import trace_model
    from lightning_3d.planner.traced import traced_model

    alone = copy.deepcopy(cfg)
    alone.strategy = OmegaConf.create({"_target_": MESH_STRATEGY})
    alone.trainer.devices, alone.trainer.num_nodes = 1, 1
    alone.batch.global_size, alone.batch.micro_size = 1, None
    training = replace(training_of(alone), precision="bf16-true")
    module = training.built()
    with told_if_slow(
        f"tracing {type(module).__name__}: its step runs without values", partial(print, file=sys.stderr)
    ):
        traced = trace_model(module, training.step_of(module, training.batch))
    return traced_model(traced, module, samples=1)
