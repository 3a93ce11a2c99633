"""Which stages hold which parameter and call which module: those that use them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_3d.errors import ModuleError
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.pipeline.record.step import StepRecord

Held = Mapping[str, tuple[int, ...]]
_NO_TWINS: Mapping[str, str] = MappingProxyType({})


def parameters_below(module: nn.Module, names: Iterable[str], table: ParameterTable) -> dict[str, tuple[str, ...]]:
    """Returns the first names of the parameters below each of some modules.

    Args:
        module: The whole module.
        names: Names of modules in it.
        table: Its parameters.
    """
    first = {name: row.name for row in table.rows for name in row.names}
    return {
        prefix: tuple(first[f"{prefix}.{name}"] for name, _ in module.get_submodule(prefix).named_parameters())
        for prefix in names
    }


def find_owners(
    record: StepRecord,
    firsts: Sequence[int],
    *,
    parameters: ParameterTable,
    below: Mapping[str, Collection[str]],
    twins: Mapping[str, str] = _NO_TWINS,
) -> tuple[Held, Held]:
    """Returns the stages of each parameter by first names, and those of each watched module, lowest first.

    What is used after a block has begun belongs to the stage of that block, what is used before all to the first. A
    parameter that the step does not use goes where its twin is, or with those that lie beside it in a watched module.

    Args:
        record: A recorded step.
        firsts: The first block of each stage.
        parameters: The module's parameters.
        below: First names of the parameters below each block and watched module.
        twins: The original of each parameter of a copy that the step does not use.
    """

    def stage(position: int) -> int:
        return max(index for index, first in enumerate(firsts) if first <= max(position - 1, 0))

    def stages(positions: Iterable[int]) -> set[int]:
        return {stage(position) for position in positions}

    holders = {name: stages(positions) for name, positions in record.parameters.items()}
    for copy, original in twins.items():
        if copy not in holders and original in holders:
            holders[copy] = set(holders[original])
    modules = {name: stages(positions) for name, positions in record.modules.items()}
    for name in (name for name in below if name not in modules):
        known = [holders[parameter] for parameter in below[name] if parameter in holders]
        everywhere = set.intersection(*known) if known else set()
        modules[name] = everywhere or {min(set().union(*known), default=0)}
        for parameter in below[name]:
            holders.setdefault(parameter, set()).update(modules[name])
    for row in parameters.rows:
        holders.setdefault(row.name, {0})
    return (
        {row.name: tuple(sorted(holders[row.name])) for row in parameters.rows},
        {name: tuple(sorted(found)) for name, found in modules.items()},
    )


def refuse_replicated_statistics(module: nn.Module, modules: Held) -> None:
    """Refuses modules with running statistics that several stages call: each would keep statistics of its own.

    Args:
        module: The whole module.
        modules: The stages that call each watched module.

    Raises:
        ModuleError: There is one.
    """
    for name, stages in modules.items():
        for path, child in module.get_submodule(name).named_modules() if len(stages) > 1 else ():
            if isinstance(child, _NormBase) and child.track_running_stats:
                raise ModuleError(
                    f"{'.'.join(filter(None, (name, path)))} keeps running statistics and is called on stages "
                    f"{', '.join(map(str, stages))}, each of which would see a part of the batches.",
                    fix="a module of its own for each call, or track_running_stats=False, or another layers_per_stage",
                )
