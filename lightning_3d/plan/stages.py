"""The pipeline axis as one rank has it after a plan was applied."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.gradients import PipelineShare
from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.parallel.pipeline.run.runs import PipelineRuns
from lightning_3d.parallel.pipeline.shared import SharedGradients
from lightning_3d.shards.presence import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesOnRank:
    """The stages of one rank, and what they have in common with those of others.

    Attributes:
        engine: Runs schedules of micro-batches.
        runs: Runs the user's code on one stage, or on all ranks of the pipeline together.
        gradients: Sums the gradients of parameters that several ranks hold.
        share: What this rank knows of the gradients of the whole mesh.
        presence: Which rank has what.
    """

    engine: PipelineEngine
    runs: PipelineRuns
    gradients: SharedGradients
    share: PipelineShare
    presence: Presence
