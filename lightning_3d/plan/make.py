"""The decisions that are made before a module is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.graph.blocks import Stack, find_stacks, modules_with_statistics
from lightning_3d.graph.parameters import ParameterTable, parameter_table
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.data.plan import DataPlan, plan_data
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.planning import find_pipeline_plan
from lightning_3d.parallel.pipeline.stacks import drawing_modules
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.shards.layout import Layout

Step = Callable[[], Any]
_NO_LAYOUTS: Mapping[str, Layout] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is decided before a module is touched.

    Attributes:
        mesh: Degrees of the axes.
        parameters: The module's parameters under all their names.
        stacks: Its stacks of blocks.
        drawing: Modules with random streams of their own, the same ones on every mesh.
        data: The data axis.
        pipeline: The pipeline axis; None where its degree is 1.
        tensor: The tensor axis; None where its degree is 1.
    """

    mesh: MeshSpec
    parameters: ParameterTable
    stacks: tuple[Stack, ...]
    drawing: tuple[str, ...]
    data: DataPlan
    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """How the tensor axis cuts parameters, by their first names."""
        return _NO_LAYOUTS if self.tensor is None else self.tensor.layouts

    @property
    def whole_backward(self) -> bool:
        """Whether no stage splits a backward: gradients arrive in hooks, or at leaves that are no parameters."""
        return self.data.engine != "none" or self.tensor is not None

    def __str__(self) -> str:
        stacks = ", ".join(str(stack) for stack in self.stacks) or "none found"
        rows = {"mesh": self.mesh, "model": self.parameters, "stacks": stacks, "data axis": self.data}
        lines = [f"{title:<10} {row}" for title, row in rows.items()]
        return "\n".join([*lines, *(str(plan) for plan in (self.pipeline, self.tensor) if plan is not None)])


def make_plan(
    module: LightningModule,
    mesh: MeshSpec,
    config: StrategyConfig,
    *,
    casts: bool = False,
    backward_inside: bool = False,
    step: Step | None = None,
) -> Plan:
    """Returns the plan for an untouched module.

    Args:
        module: The whole module, real or on the meta device.
        mesh: Degrees of the axes.
        config: The strategy's options.
        casts: Parameters are cast as they gather.
        backward_inside: Steps run backward themselves (manual optimization).
        step: Runs the user's step on its first batch, for axes that are planned by what it computes.
    """
    parameters = parameter_table(module)
    stacks = find_stacks(module)
    data = plan_data(
        parameters,
        stacks,
        zero_stage=config.zero_stage,
        data_size=mesh.data,
        unit_blocks=config.unit_blocks,
        cpu_offload=config.cpu_offload,
        needs_units=casts or backward_inside,
        tensor_size=mesh.tensor,
        pipeline_size=mesh.pipeline,
        full_precision=modules_with_statistics(module) if casts else (),
    )
    pipeline = tensor = None
    if mesh.pipeline > 1:
        assert step is not None, "the pipeline axis is planned by what a step computes"
        pipeline = find_pipeline_plan(
            module, step, parameters=parameters, stacks=stacks, ranks=mesh.pipeline, config=config
        )
    if mesh.tensor > 1:
        assert step is not None, "the tensor axis is planned by what a step computes"
        tensor = find_tensor_plan(
            module,
            step,
            parameters=parameters,
            stacks=stacks,
            size=mesh.tensor,
            tensor_plan=config.tensor_plan,
            sequence=config.sequence_parallel,
            pad_vocabulary=config.pad_vocabulary,
        )
    return Plan(
        mesh=mesh,
        parameters=parameters,
        stacks=stacks,
        drawing=drawing_modules(module, stacks, config.pipeline_stack),
        data=data,
        pipeline=pipeline,
        tensor=tensor,
    )
