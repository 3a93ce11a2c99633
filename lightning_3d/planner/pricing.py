"""The price of a mesh: memory of the rank that holds most, time of a step."""

from __future__ import annotations

from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import FITTED, Constants
from lightning_3d.planner.footprint import footprint
from lightning_3d.planner.model import ModelGraph
from lightning_3d.planner.obstacle import obstacle
from lightning_3d.planner.prediction import MemoryParts, Prediction
from lightning_3d.planner.shared import Shared
from lightning_3d.planner.software import THIS_LIBRARY, Software
from lightning_3d.planner.step import step_time


class Pricer:
    """Prices meshes for one model on one cluster; the formulas are those of docs/planner.md.

    Args:
        model: The model.
        cluster: The cluster.
        bytes_recipe: Name of the recipe of bytes per parameter.
        software: What runs.
        constants: What the formulas leave open.

    Raises:
        ConfigError: There is no such recipe.
    """

    def __init__(
        self,
        model: ModelGraph,
        cluster: Cluster,
        bytes_recipe: str,
        *,
        software: Software = THIS_LIBRARY,
        constants: Constants = FITTED,
    ) -> None:
        self.shared = Shared(model, cluster, bytes_recipe, software, constants)

    def predict(self, case: Case) -> Prediction:
        """Returns the prediction for a case.

        Args:
            case: What to price.

        Raises:
            MeshError: The model cannot be cut so.
            BatchError: The batch cannot.
        """
        found = obstacle(self.shared.model, case.mesh, case.batch)
        if found is not None:
            raise found.error()
        memory, rank, flights = footprint(self.shared, case)
        time, hidden = step_time(self.shared, case)
        samples = case.batch.global_size
        scale = self.shared.cluster.time_scale
        unscaled = Prediction(
            mesh=case.mesh,
            batch=case.batch,
            microbatches=case.microbatches,
            pipeline_schedule=case.schedule,
            activation_checkpointing=case.kind,
            bytes_recipe=self.shared.recipe_name,
            cluster=self.shared.cluster.name,
            memory=memory,
            memory_rank=rank,
            needed_bytes=self.needed(memory),
            capacity=self.shared.cluster.memory,
            time=time,
            hidden_data_seconds=hidden,
            in_flight=flights,
            model_flops=3 * self.shared.flops * samples,
            hardware_flops=(3 * self.shared.flops + self.shared.again[case.kind]) * samples,
            peak_flops=self.shared.speed.peak * case.mesh.devices,
            time_band=self.shared.cluster.time_band,
        )
        return unscaled if scale == 1 else unscaled.scaled(scale)

    def needed(self, memory: MemoryParts) -> float:
        """Returns the bytes that a device must have for those that are allocated."""
        constants, reserved = self.shared.constants, self.shared.cluster.reserved
        return constants.needed_share * memory.total + (constants.needed_constant if reserved is None else reserved)
