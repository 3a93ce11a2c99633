"""The part of the strategy that shows what it does: the plan before training, and a step of a pipeline in time."""

from __future__ import annotations

from lightning_3d.errors import ModuleError
from lightning_3d.mesh.topology import Topology
from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.parallel.pipeline.report import StepTimelines
from lightning_3d.strategy.saving import SavingStrategy


class ExplainingStrategy(SavingStrategy):
    """A strategy on a mesh that tells its plan; what trains is added by `Mesh3DStrategy`."""

    def explain(self) -> str:
        """Returns the plan and the map of ranks to nodes as text; known once the Trainer has set the module up."""
        topology = Topology(spec=self.mesh_spec, devices_per_node=self.num_processes)
        return "\n".join([str(self._module_on_mesh), "", str(topology), *topology.advice()])

    def start_pipeline_timeline(self) -> None:
        """Begins to take the times of what stages compute; every rank must call it, between two training steps.

        Raises:
            ModuleError: The module is on no pipeline.
        """
        self._pipeline_engine.start_timeline()

    def stop_pipeline_timeline(self) -> StepTimelines:
        """Returns what the ranks of this pipeline have computed since the start, beside what the schedule would be.

        Every rank must call it, after one training step.

        Raises:
            ModuleError: The module is on no pipeline.
        """
        measured = self._pipeline_engine.stop_timeline()
        report = self._module_on_mesh.pipeline_report
        assert report is not None, "there is a pipeline"
        return report.timelines(measured)

    @property
    def _pipeline_engine(self) -> PipelineEngine:
        stages = self._module_on_mesh.engine.stages
        if stages is None:
            raise ModuleError(
                "there is no pipeline to take the time of: pipeline_parallel_size=1.", fix="pipeline_parallel_size=2"
            )
        return stages.engine
