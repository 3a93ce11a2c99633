"""Applying a pipeline plan: what no stage of this rank owns is freed, and each stage becomes a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.stage_module import StageModule
from lightning_3d.shards.absent import Arrivals, Elsewhere, absent_parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedStages:
    """The stages of one rank.

    Attributes:
        stages: A module for each of them, in model order.
    """

    stages: Mapping[int, StageModule]

    @property
    def ignored(self) -> Mapping[int, frozenset[nn.Parameter]]:
        """For each stage the parameters, as they are now, that a lower stage of this rank manages."""
        found: dict[int, frozenset[nn.Parameter]] = {}
        lower: set[nn.Parameter] = set()
        for index, stage in self.stages.items():
            own = set(stage.parameters())
            found[index] = frozenset(own & lower)
            lower |= own
        return found


def apply_pipeline(module: nn.Module, plan: PipelinePlan, rank: int, device: torch.device) -> AppliedStages:
    """Frees in place what the stages of a rank do not own, and makes a module of each stage.

    A freed parameter becomes an absent one, under all its names and in the attributes and lists that hold it. It keeps
    its shape, its dtype, ``requires_grad`` and what users have written on it. Buffers stay.

    Args:
        module: The whole module.
        plan: The plan that was made for it.
        rank: This rank's place on the pipeline axis.
        device: This rank's device.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = {index: _held(plan, index) for index in range(len(plan.stages))}
    present = frozenset[str]().union(*(held[stage.index] for stage in plan.stages_of(rank)))
    stages = {
        stage.index: _stage_module(module, plan, stage.index, held[stage.index], names)
        for stage in plan.stages_of(rank)
    }
    arrivals = Arrivals()

    def without_memory(name: str, parameter: nn.Parameter) -> nn.Parameter:
        elsewhere = Elsewhere(name=name, ranks=frozenset(plan.ranks_holding(name)), rank=rank)
        return absent_parameter(parameter, elsewhere, device, arrivals)

    absent = {
        id(parameter): without_memory(name, parameter)
        for name, parameter in module.named_parameters()
        if name not in present
    }
    for child in module.modules():
        for place in (child._parameters, vars(child)):
            _replace(place, absent)
    return AppliedStages(stages=stages)


def _held(plan: PipelinePlan, stage: int) -> frozenset[str]:
    return frozenset(name for name, stages in plan.holders.items() if stage in stages)


def _stage_module(
    module: nn.Module, plan: PipelinePlan, stage: int, held: frozenset[str], names: Mapping[int, str]
) -> StageModule:
    parts = [module.get_submodule(name) for name, stages in plan.modules.items() if stage in stages]
    inside = {child for part in parts for child in part.modules()}
    holders = []
    for child in module.modules():
        own = {key for key, parameter in child._parameters.items() if names.get(id(parameter)) in held}
        if own and child not in inside:
            holders.append((child, frozenset(own)))
    return StageModule(stage, parts, holders)


def _replace(place: dict[str, Any], absent: Mapping[int, nn.Parameter]) -> None:
    for key, value in place.items():
        if isinstance(value, list):
            # As torch's recurrent layers have of their weights.
            value[:] = [absent.get(id(each), each) for each in value]
        else:
            place[key] = absent.get(id(value), value)
