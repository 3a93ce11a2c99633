"""What is sharded over the data axis: the engine, the shard units and when they gather and reduce."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from lightning_3d.graph.blocks import Stack, outwards
from lightning_3d.graph.parameters import ParameterInfo, ParameterTable
from lightning_3d.units import counted

Engine = Literal["none", "ddp", "replicate", "fully_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUnit:
    """Modules that gather and reduce together.

    Attributes:
        modules: Their names.
        keeps_precision: They compute in the precision of their parameters, whatever the others are cast to.
    """

    modules: tuple[str, ...]
    keeps_precision: bool = False

    def __str__(self) -> str:
        return " + ".join(self.modules)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """The decision for the data axis.

    Attributes:
        engine: "none" (one rank), torch's "ddp" or "replicate" (stage 0), or "fully_shard" (stages 1 to 3).
        zero_stage: 0 to 3.
        units: The units below the root, inner ones first; what they leave is the root unit.
        cpu_offload: Shards and optimizer state live in host memory.
    """

    engine: Engine
    zero_stage: int
    units: tuple[ShardUnit, ...] = ()
    cpu_offload: bool = False

    def __str__(self) -> str:
        if self.engine == "none":
            return "one rank, nothing to shard"
        text = f"zero_stage {self.zero_stage} by {self.engine}"
        return text if self.engine == "ddp" else f"{text}, {counted(len(self.units), 'unit')} and the root"


def plan_data(
    table: ParameterTable,
    stacks: tuple[Stack, ...],
    *,
    zero_stage: int,
    data_size: int,
    unit_blocks: int = 1,
    cpu_offload: bool = False,
    needs_units: bool = False,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    full_precision: tuple[str, ...] = (),
) -> DataPlan:
    """Returns the plan of the data axis.

    Args:
        table: The parameters of the whole module.
        stacks: Its stacks of blocks.
        zero_stage: 0 to 3.
        data_size: Number of data ranks.
        unit_blocks: Blocks per unit.
        cpu_offload: Keep shards in host memory.
        needs_units: The run needs an engine that works unit by unit even where a plainer one would do: a precision
            that casts parameters as they gather, or a backward inside the step (manual optimization).
        tensor_size: Number of tensor ranks. DDP knows plain tensors only, so ``replicate`` takes its place above 1.
        pipeline_size: Number of pipeline ranks. DDP serves one backward for each forward in turn, so ``replicate``
            takes its place above 1.
        full_precision: Modules that are not cast with the others.
    """
    engine: Engine
    if zero_stage == 0 and (needs_units or (data_size > 1 and max(tensor_size, pipeline_size) > 1)):
        engine = "replicate"
    elif zero_stage == 0:
        engine = "ddp" if data_size > 1 else "none"
    elif data_size == 1 and not needs_units and not cpu_offload:
        engine = "none"
    else:
        engine = "fully_shard"
    if engine in ("none", "ddp"):
        return DataPlan(engine=engine, zero_stage=zero_stage)
    units = shard_units(table, stacks, unit_blocks=unit_blocks)
    inner = _inside(full_precision, units)
    return DataPlan(engine=engine, zero_stage=zero_stage, units=(*inner, *units), cpu_offload=cpu_offload)


def shard_units(table: ParameterTable, stacks: tuple[Stack, ...], *, unit_blocks: int) -> tuple[ShardUnit, ...]:
    """Returns the units of ``unit_blocks`` neighbouring blocks each.

    Blocks that share a parameter are one unit, since a parameter can be managed only once. A unit that shares one
    with anything outside the stacks belongs to the root.
    """
    groups = [
        stack.blocks[at : at + unit_blocks] for stack in stacks for at in range(0, len(stack.blocks), unit_blocks)
    ]
    home = {block: index for index, group in enumerate(groups) for block in group}
    root = len(groups)
    merged = list(range(root + 1))
    for names in table.ties:
        owners = {merged[_home(name, home, root)] for name in names}
        target = max(owners)
        merged = [target if owner in owners else owner for owner in merged]
    units: dict[int, list[str]] = {}
    for index, group in enumerate(groups):
        if merged[index] != merged[root]:
            units.setdefault(merged[index], []).extend(group)
    return tuple(ShardUnit(modules=tuple(modules)) for modules in units.values())


def _inside(names: tuple[str, ...], units: tuple[ShardUnit, ...]) -> tuple[ShardUnit, ...]:
    """Modules that keep their precision, those of one unit together."""
    home = {block: index for index, unit in enumerate(units) for block in unit.modules}
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(_home(f"{name}.weight", home, len(units)), []).append(name)
    return tuple(ShardUnit(modules=tuple(group), keeps_precision=True) for group in groups.values())


def stage_units(
    units: tuple[ShardUnit, ...], *, modules: Collection[str], apart: Collection[str] = ()
) -> tuple[ShardUnit, ...]:
    """Returns what is left of the units of a whole module in one stage of a pipeline.

    Args:
        units: The units.
        modules: Names of modules that the stage calls.
        apart: All names of parameters that several stages of a rank hold. Their modules belong to the root, which
            stays gathered while another stage computes.
    """
    kept = [
        replace(unit, modules=tuple(name for name in unit.modules if _is_in(name, modules) and not _holds(name, apart)))
        for unit in units
    ]
    return tuple(unit for unit in kept if unit.modules)


def _is_in(name: str, modules: Collection[str]) -> bool:
    return name in modules or any(prefix in modules for prefix in outwards(name))


def _holds(module: str, parameters: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for name in parameters)


def unit_parameters(table: ParameterTable, units: tuple[ShardUnit, ...]) -> tuple[tuple[ParameterInfo, ...], ...]:
    """Returns the parameters of each unit, and last those of the root."""
    home = {block: index for index, unit in enumerate(units) for block in unit.modules}
    owned: list[list[ParameterInfo]] = [[] for _ in range(len(units) + 1)]
    for row in table.rows:
        # In a stage a tied parameter may have its first name elsewhere.
        owned[min(_home(name, home, len(units)) for name in row.names)].append(row)
    return tuple(map(tuple, owned))


def _home(name: str, home: dict[str, int], root: int) -> int:
    """The innermost group that a parameter lies in, or the root."""
    return next((home[prefix] for prefix in outwards(name) if prefix in home), root)
