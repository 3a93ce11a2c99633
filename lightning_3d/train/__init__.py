"""Training a model from a configuration: one job, a sweep of jobs, on one process or many."""

from lightning_3d.train.command import run

__all__ = ["run"]
