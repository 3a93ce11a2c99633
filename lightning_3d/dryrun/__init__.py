"""The dry run: any rank of any mesh in one process, without memory and without other ranks."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_3d.dryrun.command import run

if TYPE_CHECKING:
    from lightning_3d.dryrun.play import dry_run, representatives
    from lightning_3d.dryrun.report import DryRunReport, Padding, RankReport, Sample
    from lightning_3d.dryrun.training import Training

__all__ = ["DryRunReport", "Padding", "RankReport", "Sample", "Training", "dry_run", "representatives", "run"]

if not TYPE_CHECKING:
    # They need torch, and a misspelt option should not wait for that.
    _LAZY = MappingProxyType(
        {
            "DryRunReport": "report",
            "Padding": "report",
            "RankReport": "report",
            "Sample": "report",
            "Training": "training",
            "dry_run": "play",
            "representatives": "play",
        }
    )

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
