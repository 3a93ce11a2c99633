"""The verb ``dryrun``: from the words of a command line to a printed report."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning_3d.config.compose import composed, readable_errors, told_plainly
from lightning_3d.config.search import importable_here
from lightning_3d.dryrun.asked import coordinates_of, mesh_of
from lightning_3d.log import told_if_slow

_SAMPLES = 160


def run(arguments: Sequence[str]) -> int:
    """Plays some ranks of a training and prints what they do.

    Args:
        arguments: Hydra's overrides, ``--config-dir DIRECTORY``, and ``--cfg job`` to show the configuration alone.

    Returns:
        0, once the report is printed.

    Raises:
        Lightning3DError: The configuration is impossible, or the strategy would refuse the module.
    """
    cfg = composed(arguments, "dryrun")
    if cfg is None:
        return 0
    coordinates = coordinates_of(cfg.coordinates, mesh_of(cfg)[1])
    # What is misspelt or impossible should not wait for torch to be imported.
    from lightning_3d.dryrun.picture import draw
    from lightning_3d.dryrun.play import dry_run
    from lightning_3d.dryrun.setup import training_of
    from lightning_3d.dryrun.tracing import price_of

    with importable_here(), readable_errors(), told_plainly(), warnings.catch_warnings():
        # Lightning's and torch's own uses of torch, about which nobody can do anything here.
        warnings.simplefilter("ignore")
        training = training_of(cfg)
        with told_if_slow("playing ranks of the mesh", partial(print, file=sys.stderr)):
            samples = _SAMPLES if cfg.picture else 0
            report = dry_run(training, coordinates, samples=samples, price=partial(price_of, cfg))
    print(json.dumps(report.as_data(), indent=2) if cfg.json else report)
    if cfg.picture:
        print(f"picture    {draw(report, Path(cfg.picture))}", file=sys.stderr if cfg.json else sys.stdout)
    return 0
