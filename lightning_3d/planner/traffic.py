"""What a rank sends in a step, axis by axis, by the formulas of each axis' own price."""

from __future__ import annotations

from lightning_3d.cost import Traffic, TrafficRow
from lightning_3d.mesh.spec import PIPELINE_AXIS
from lightning_3d.parallel.data.cost import DataSizes, UnitSize, data_traffic
from lightning_3d.parallel.data.plan import DataPlan
from lightning_3d.parallel.tensor.cost import Sums, tensor_traffic
from lightning_3d.planner.case import Case
from lightning_3d.planner.layout import Kind
from lightning_3d.planner.shared import Shared


def step_traffic(shared: Shared, case: Case, rank: int | None = None) -> Traffic:
    """Returns what a pipeline rank sends in an optimizer step.

    Args:
        shared: The model on its cluster.
        case: What to price.
        rank: The pipeline rank; None for the one with most parameters.
    """
    layout = shared.layout(case)
    most = max(layout.kinds, key=lambda one: shared.parameters(case.mesh, one)[1])
    kind = most if rank is None else layout.kind_of(rank)
    return _data(shared, case, kind) + _tensor(shared, case, kind) + _pipeline(shared, case, kind)


def _data(shared: Shared, case: Case, kind: Kind) -> Traffic:
    mesh, tensor = case.mesh, case.mesh.tensor_parallel_size
    if mesh.data_parallel_size == 1:
        return Traffic()
    shards = mesh.shards if mesh.zero_stage else 1
    prefix = shared.parameter_prefix(tensor, shards)
    sizes = [prefix[index + 1] - prefix[index] for begin, end in kind.spans for index in range(begin, end)]
    units = tuple(_unit(shared, size) for size in sizes)
    plan = DataPlan(engine="fully_shard" if mesh.zero_stage else "replicate", zero_stage=mesh.zero_stage)
    whole = DataSizes(
        blocks=units,
        root=_unit(shared, shared.ends(tensor, shards, kind)),
        replicas=mesh.data_replicate_size if mesh.zero_stage else mesh.data_parallel_size,
        shards=shards,
    )
    return data_traffic(plan, whole, microbatches=case.microbatches)


def _unit(shared: Shared, elements: float) -> UnitSize:
    return UnitSize(gathered=round(elements * shared.gathered), reduced=round(elements * shared.reduced))


def _tensor(shared: Shared, case: Case, kind: Kind) -> Traffic:
    ends = ((shared.model.first, kind.has_first), (shared.model.last, kind.has_last))
    parts = [shared.blocks[index] for begin, end in kind.spans for index in range(begin, end)]
    # Kept products are those before the sums: what is computed again is summed again.
    again = case.kind == "full" or (case.kind == "selective" and shared.software.selective == "products")
    sums = []
    for part in (*parts, *(part for part, there in ends if there)):
        payload = round(part.state * case.batch.micro_size * shared.recipe.computed / 2)
        if part.sums and part.is_block:
            # What is computed again ends before the block's last sum.
            extra = part.sums - 1 if again else 0
            sums.append(Sums(forward=part.sums, backward=part.sums + extra, payload=payload, gathers=1 if again else 0))
        elif part.sums:
            # An embedding sums forward, a head backward.
            sums.append(Sums(forward=part.sums, backward=0, payload=payload))
    return tensor_traffic(
        sums,
        size=case.mesh.tensor_parallel_size,
        microbatches=case.microbatches,
        sequence=case.mesh.sequence_parallel,
    )


def _pipeline(shared: Shared, case: Case, kind: Kind) -> Traffic:
    ranks = case.mesh.pipeline_parallel_size
    if ranks == 1:
        return Traffic()
    crossings = 2 * case.stages_per_rank - kind.has_first - kind.has_last
    calls = case.microbatches * crossings
    payload = calls * round(shared.state(case) * case.batch.micro_size)
    row = TrafficRow(operation="send", axis=PIPELINE_AXIS, group_size=ranks, calls=calls, payload=payload)
    return Traffic(rows=(row,))
