"""The dry run: any rank of any mesh in one process, without memory and without other ranks."""

from lightning_3d.dryrun.command import run
from lightning_3d.dryrun.play import dry_run, representatives
from lightning_3d.dryrun.report import DryRunReport, Padding, RankReport, Sample
from lightning_3d.dryrun.training import Training

__all__ = ["DryRunReport", "Padding", "RankReport", "Sample", "Training", "dry_run", "representatives", "run"]
