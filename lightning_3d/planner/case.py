"""One question to the planner: a mesh, a batch, a schedule, a kind of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.config.schema import KEPT_KINDS
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.pipeline.schedule.actions import runnable_microbatches
from lightning_3d.planner.bubble import checked_schedule
from lightning_3d.planner.shapes import BatchShape, MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to price.

    Attributes:
        mesh: The mesh.
        batch: The batch.
        schedule: The schedule that runs.
        kind: Of activation checkpointing.
        microbatches: Micro-batches of a data rank, those that the schedule adds included.
    """

    mesh: MeshShape
    batch: BatchShape
    schedule: str
    kind: str
    microbatches: int

    @classmethod
    def checked(cls, mesh: MeshShape, batch: BatchShape, schedule: str, kind: str) -> Case:
        """Returns the case.

        Args:
            mesh: The mesh.
            batch: The batch.
            schedule: Name of the schedule.
            kind: Of activation checkpointing.

        Raises:
            Lightning3DError: Batch and mesh do not fit each other, or a name is unknown.
        """
        if kind not in KEPT_KINDS:
            raise ConfigError(f"activation_checkpointing={kind!r} does not exist.", valid=KEPT_KINDS)
        runs = checked_schedule(schedule, mesh.stages_per_rank) if mesh.pipeline_parallel_size > 1 else "1f1b"
        count = batch.microbatches(mesh.data_parallel_size)
        count = runnable_microbatches(runs, ranks=mesh.pipeline_parallel_size, microbatches=count)
        return cls(mesh=mesh, batch=batch, schedule=runs, kind=kind, microbatches=count)

    @property
    def stages_per_rank(self) -> int:
        """Stages on a rank of the pipeline axis, if there is one."""
        return self.mesh.stages_per_rank if self.mesh.pipeline_parallel_size > 1 else 1
