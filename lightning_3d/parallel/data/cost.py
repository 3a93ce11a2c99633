"""The price of a DataPlan: collectives of an optimizer step, and bytes that live between its parts.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", give the memory in
section 5 and the traffic in section 7. FSDP2 differs from the paper in four ways, all of them priced here:

- At stages 1 and 2 whole parameters live beside the shards from the first forward to the last backward of a step, and
  not between steps. The paper's whole copy lives always; with 16-bit copies of 32-bit shards the sum is the paper's,
  with one dtype for both FSDP2 holds a shard more.
- Whole gradients that wait for the last micro-batch (stage 1) have the dtype of the reduction, the paper's are 16-bit.
- At stage 3 the root unit is gathered once per optimizer step, where the paper gathers all parameters twice for
  each forward and backward.
- Dim 0 of every parameter is padded to a multiple of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_3d.cost import Footprint, Traffic, TrafficRow
from lightning_3d.graph.parameters import ParameterInfo, ParameterTable
from lightning_3d.mesh.spec import DATA_AXIS, DATA_REPLICATE, DATA_SHARD, MeshSpec
from lightning_3d.parallel.data.plan import DataPlan, stage_units, unit_parameters

# Moments of an optimizer step at which no unit is at work:
# between two steps; between forward and backward of a micro-batch that is not the first; after the last backward.
Moment = Literal["between_steps", "before_backward", "after_backward"]

# DDP's first bucket, so that reducing starts early, and the others.
_BUCKET_LIMITS = (2**20, 25 * 2**20)
_USED_MAP_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSize:
    """Bytes of one unit's parameters, whole and padded.

    Attributes:
        stored: As the optimizer keeps them, frozen ones included.
        gathered: As they are computed with, frozen ones included.
        trained: Those that train, in the stored dtype: also the bytes of gradients and of each optimizer state.
        reduced: Gradients in the dtype of their reduction.
    """

    stored: int = 0
    gathered: int = 0
    trained: int = 0
    reduced: int = 0

    def __add__(self, other: UnitSize) -> UnitSize:
        return UnitSize(
            stored=self.stored + other.stored,
            gathered=self.gathered + other.gathered,
            trained=self.trained + other.trained,
            reduced=self.reduced + other.reduced,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSizes:
    """What the price of a DataPlan depends on.

    Attributes:
        blocks: The units below the root.
        root: The root unit.
        replicas: Ranks that hold the same shard.
        shards: Ranks among which a unit is divided.
        buckets: Bytes of each of DDP's buckets, its own unused parameter included.
        used_map: Bytes of the map with which DDP's ranks tell each other which parameters were used.
    """

    blocks: tuple[UnitSize, ...]
    root: UnitSize
    replicas: int
    shards: int
    buckets: tuple[int, ...] = ()
    used_map: int = 0

    @property
    def whole(self) -> UnitSize:
        """All units together."""
        return sum(self.blocks, self.root)


def stage_share(
    table: ParameterTable,
    plan: DataPlan,
    *,
    managed: Collection[str],
    modules: Collection[str],
    apart: Collection[str] = (),
) -> tuple[ParameterTable, DataPlan]:
    """Returns a stage's share of a whole module, to be priced by the same formulas; a rank pays for all its stages.

    Args:
        table: The parameters of the whole module.
        plan: The plan of the whole module.
        managed: First names of the parameters that the stage manages: what it holds and no lower stage of its rank.
        modules: Names of modules that the stage calls.
        apart: All names of parameters that several stages of the rank hold.
    """
    rows = tuple(row for row in table.rows if row.name in managed)
    return ParameterTable(rows=rows), replace(plan, units=stage_units(plan.units, modules=modules, apart=apart))


def data_sizes(
    table: ParameterTable, plan: DataPlan, mesh: MeshSpec, *, policy: MixedPrecisionPolicy | None = None
) -> DataSizes:
    """Returns the sizes of a plan's units.

    Args:
        table: The parameters that the plan was made for.
        plan: The plan.
        mesh: Degrees of the data axis.
        policy: Dtypes of gathered parameters and of reductions.
    """
    policy = policy or MixedPrecisionPolicy()
    sharded = plan.engine == "fully_shard"
    shards = mesh.data_shard if sharded else 1
    own = [MixedPrecisionPolicy() if unit.keeps_precision else policy for unit in plan.units]
    rows_of = unit_parameters(table, plan.units)
    *blocks, root = (_unit_size(rows, shards, cast) for rows, cast in zip(rows_of, [*own, policy], strict=True))
    trained = [row for row in table.rows if row.requires_grad]
    ddp = plan.engine == "ddp"
    return DataSizes(
        blocks=tuple(blocks),
        root=root,
        replicas=mesh.data_replicate if sharded else mesh.data,
        shards=shards,
        buckets=_ddp_buckets(table.rows[0].dtype, trained) if ddp else (),
        used_map=_USED_MAP_BYTES * (1 + len(trained)) if ddp else 0,
    )


def data_traffic(plan: DataPlan, sizes: DataSizes, *, microbatches: int) -> Traffic:
    """Returns the collectives of one optimizer step, as each rank takes part in them.

    P = bytes of all parameters, M = micro-batches. Gathered at stages 1 and 2: P; at stage 3: 2 M times the blocks and
    once the root. Scattered at stage 1: P; at stages 2 and 3: M P. Hybrid sharding adds an all-reduce of P / shards
    over the replicas. Stage 0 reduces P, in DDP's buckets and its map of used parameters, or unit by unit. The same
    holds in the stages of a pipeline.

    Args:
        plan: The plan.
        sizes: Sizes of its units.
        microbatches: Micro-batches of an optimizer step: those of a batch x accumulated batches.
    """
    if plan.engine == "ddp":
        reduced = (*sizes.buckets, sizes.used_map)
        return Traffic(rows=_row("all_reduce", DATA_AXIS, sizes.replicas, reduced))
    gathers = 2 * microbatches if plan.zero_stage == 3 else 1
    scatters = microbatches if plan.zero_stage >= 2 else 1
    hybrid = plan.engine == "fully_shard" and sizes.replicas > 1
    shard_axis, replica_axis = (DATA_SHARD, DATA_REPLICATE) if hybrid else (DATA_AXIS, DATA_AXIS)
    units = (*sizes.blocks, sizes.root)
    gathered = [unit.gathered for unit in sizes.blocks for _ in range(gathers)] + [sizes.root.gathered]
    scattered = [unit.reduced for unit in units for _ in range(scatters)]
    reduced = tuple(unit.reduced // sizes.shards for unit in units)
    return Traffic(
        rows=(
            *_row("all_gather", shard_axis, sizes.shards, gathered),
            *_row("reduce_scatter", shard_axis, sizes.shards, scattered),
            *_row("all_reduce", replica_axis, sizes.replicas, reduced),
        )
    )


def data_footprint(plan: DataPlan, sizes: DataSizes, moment: Moment, *, optimizer_states: int = 2) -> Footprint:
    """Returns the bytes of weights, gradients and optimizer state that live on the rank that holds most.

    Between steps and after the last backward: parameters, gradients and optimizer state, each divided by the shards
    (Lightning drops gradients only when the next ones are due). Before a later backward also the gathered parameters,
    at stage 3 those of the root, and at stage 1 (at 0 by ``replicate``) whole gradients in place of their shards.
    Activations, buffers of collectives in flight and the optimizer's step counters are not in it.

    Args:
        plan: The plan.
        sizes: Sizes of its units.
        moment: When.
        optimizer_states: Copies of the parameters in the optimizer: 2 for Adam.
    """
    whole, shards = sizes.whole, sizes.shards
    stored, trained = whole.stored // shards, whole.trained // shards
    at_rest = Footprint(parameters=stored, gradients=trained, optimizer=optimizer_states * trained)
    if moment != "before_backward" or plan.engine in ("none", "ddp"):
        return at_rest
    gathered = sizes.root.gathered if plan.zero_stage == 3 else whole.gathered
    if plan.zero_stage < 2:
        gradients = Footprint(gathered_gradients=whole.reduced)
    elif sizes.replicas > 1:
        # The sum over the shards' ranks waits, as it was reduced, for the replicas' in the last micro-batch.
        gradients = Footprint(gradients=whole.reduced // shards)
    else:
        gradients = Footprint(gradients=trained)
    weights = Footprint(parameters=stored, gathered_parameters=gathered, optimizer=optimizer_states * trained)
    return weights + gradients


def _row(operation: str, axis: str, group_size: int, payloads: Iterable[int]) -> tuple[TrafficRow, ...]:
    """One row for calls with these payloads; none among one rank or for units without such parameters."""
    sent = [payload for payload in payloads if payload]
    if group_size == 1 or not sent:
        return ()
    row = TrafficRow(operation=operation, axis=axis, group_size=group_size, calls=len(sent), payload=sum(sent))
    return (row,)


def _unit_size(rows: Iterable[ParameterInfo], shards: int, policy: MixedPrecisionPolicy) -> UnitSize:
    return sum((_parameter_size(row, shards, policy) for row in rows), UnitSize())


def _parameter_size(row: ParameterInfo, shards: int, policy: MixedPrecisionPolicy) -> UnitSize:
    rows = row.shape[0] if row.shape else 1
    padded = row.numel // max(rows, 1) * math.ceil(rows / shards) * shards
    computed = policy.param_dtype or row.dtype
    trained = padded if row.requires_grad else 0
    return UnitSize(
        stored=padded * row.dtype.itemsize,
        gathered=padded * computed.itemsize,
        trained=trained * row.dtype.itemsize,
        reduced=trained * (policy.reduce_dtype or computed).itemsize,
    )


def _ddp_buckets(first_dtype: torch.dtype, trained: Iterable[ParameterInfo]) -> tuple[int, ...]:
    """Bytes of DDP's buckets: filled in module order until they reach the limit, each with one dtype."""
    full: list[int] = []
    # One element of DDP's own, before all others.
    filling = {first_dtype: first_dtype.itemsize}
    closed: dict[torch.dtype, int] = {}
    for row in trained:
        size = filling.pop(row.dtype, 0) + row.nbytes
        if size >= _BUCKET_LIMITS[min(closed.get(row.dtype, 0), 1)]:
            full.append(size)
            closed[row.dtype] = closed.get(row.dtype, 0) + 1
        else:
            filling[row.dtype] = size
    return (*full, *filling.values())
