"""The part of the strategy that shows what it does: the plan before training, and a step of a pipeline in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.errors import ModuleError
from lightning_3d.mesh.topology import Topology
from lightning_3d.strategy.saving import SavingStrategy

if TYPE_CHECKING:
    from lightning_3d.parallel.pipeline.engine import PipelineEngine
    from lightning_3d.parallel.pipeline.report import StepTimelines
    from lightning_3d.strategy.setup.first_step import FirstStep


class ExplainingStrategy(SavingStrategy):
    """A strategy on a mesh that tells its plan; what trains is added by `Mesh3DStrategy`.

    Attributes:
        counts_flops: Whether to count the operations of the step while the module is still whole.
        sample_flops: Operations of the whole model in a forward and a backward of one sample; None if not counted.
    """

    counts_flops = False
    sample_flops: float | None = None

    def explain(self) -> str:
        """Returns the plan and the map of ranks to nodes as text; known once the Trainer has set the module up."""
        topology = Topology(spec=self.mesh_spec, devices_per_node=self.num_processes)
        return "\n".join([str(self._module_on_mesh), "", str(topology)])

    def _explain_if_asked(self) -> None:
        if self.config.explain:
            rank_zero_info("the plan of this run\n%s", self.explain())

    def _count_flops(self, module: LightningModule, step: FirstStep) -> None:
        if self.counts_flops:
            from lightning_3d.plan.flops import sample_flops

            self.sample_flops = sample_flops(module, step.args, step)

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
