"""What the planner predicts of a rank, beside what the dry run has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_3d.counters import Category, CollectiveTable, PeakReport
from lightning_3d.dryrun.planned import Planned
from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import load_cluster
from lightning_3d.planner.footprint import rank_footprint
from lightning_3d.planner.model import ModelGraph
from lightning_3d.planner.obstacle import obstacle
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.request import RECIPES, mesh_shape
from lightning_3d.planner.shapes import BatchShape
from lightning_3d.planner.traffic import step_traffic
from lightning_3d.units import format_bytes

# Bytes are the same on each of them.
_ANY_CLUSTER = "h100_x8"
# Which parts of a prediction and which categories of live bytes are the same thing. Master weights are parameters to
# one and the optimizer's to the other. What a collective has touched is kept for backward or is a buffer.
_SAME: Mapping[str, tuple[tuple[str, ...], tuple[Category, ...]]] = MappingProxyType(
    {
        "parameters, optimizer": (
            ("parameters", "gathered parameters", "optimizer", "padding"),
            (Category.PARAMETER, Category.GATHERED_PARAMETER, Category.OPTIMIZER),
        ),
        "gradients": (("gradients",), (Category.GRADIENT, Category.GATHERED_GRADIENT)),
        "activations, communication": (
            ("activations", "recomputed", "logits", "communication buffers"),
            (Category.OTHER, Category.COMMUNICATION, Category.BUFFER),
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure, predicted and found.

    Attributes:
        name: What it is.
        predicted: Bytes by the planner's formulas.
        found: Bytes of the dry run.
    """

    name: str
    predicted: float
    found: float

    @property
    def difference(self) -> float:
        """How much more is predicted than was found, as a share of what was found."""
        if not self.found:
            return float("inf") if self.predicted else 0.0
        return self.predicted / self.found - 1

    def __str__(self) -> str:
        sizes = f"{self.name:<26} {format_bytes(self.predicted):>12} {format_bytes(self.found):>12}"
        return f"{sizes} {self.difference:>+10.1%}" if self.found else f"{sizes} {'-':>10}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A prediction for one rank, beside what was found.

    Attributes:
        total: Bytes at the peak.
        memory: The same by kind.
        sent: Bytes that the rank sends in an optimizer step, by axis.
    """

    total: Compared
    memory: tuple[Compared, ...]
    sent: tuple[Compared, ...]

    def __str__(self) -> str:
        head = f"{'':<26} {'predicted':>12} {'found':>12} {'difference':>10}"
        return "\n".join([head, *map(str, (*self.memory, self.total)), *(str(one) for one in self.sent)])

    def as_data(self) -> dict[str, dict[str, dict[str, float]]]:
        """Returns predicted and found bytes as plain containers."""
        rows = {"memory": (*self.memory, self.total), "sent": self.sent}
        return {
            kind: {one.name: {"predicted": one.predicted, "found": one.found} for one in group}
            for kind, group in rows.items()
        }


class Predictor:
    """The planner, asked for the ranks of a dry run.

    Args:
        planned: The training and its plan.
        model: The price of its module.

    Raises:
        Lightning3DError: The planner has no price for this training.
    """

    def __init__(self, planned: Planned, model: ModelGraph) -> None:
        training = planned.training
        config = training.config
        batch = BatchShape(
            global_size=sum(planned.sizes) * training.mesh.data * training.accumulate, micro_size=max(planned.sizes)
        )
        self._pricer = Pricer(model, load_cluster(_ANY_CLUSTER), RECIPES[training.precision])
        mesh = mesh_shape(config, training.mesh)
        found = obstacle(model, mesh, batch)
        if found is not None:
            raise found.error()
        self._case = Case.checked(mesh, batch, config.pipeline_schedule, config.activation_checkpointing)

    def beside(self, rank: int, peak: PeakReport, traffic: CollectiveTable) -> Beside:
        """Returns the prediction for a pipeline rank, beside what was found.

        Args:
            rank: The pipeline rank.
            peak: Its peak.
            traffic: What it sends.
        """
        parts = rank_footprint(self._pricer.shared, self._case, rank)
        named = parts.by_name()
        memory = tuple(
            Compared(
                name=name,
                predicted=sum(named[part] for part in predicted),
                found=sum(peak.categories.get(category, 0) for category in found),
            )
            for name, (predicted, found) in _SAME.items()
        )
        return Beside(
            total=Compared(name="peak", predicted=parts.total, found=peak.peak.size),
            memory=memory,
            sent=self._sent(rank, traffic),
        )

    def _sent(self, rank: int, traffic: CollectiveTable) -> tuple[Compared, ...]:
        predicted: dict[str, float] = {}
        for row in step_traffic(self._pricer.shared, self._case, rank).rows:
            predicted[row.axis] = predicted.get(row.axis, 0.0) + row.wire
        found: dict[str, float] = {}
        for counted in traffic.rows:
            # A receive is the send of another rank.
            if counted.operation != "receive":
                found[counted.axis] = found.get(counted.axis, 0.0) + counted.wire
        return tuple(
            Compared(name=f"sent, {axis}", predicted=predicted[axis], found=found.get(axis, 0.0)) for axis in predicted
        )
