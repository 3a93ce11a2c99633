"""Trained modules whose checkpoints are compared with what one process would have, on meshes of all axes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.layout import every_name, module_state
from lightning_3d.checkpoint.members import Members, members_of
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.restore import load_module, load_optimizers, open_checkpoint
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.mesh.device import build_device_mesh, data_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.apply import apply_pipeline
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.presence import presence_of
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence
from lightning_3d.strategy.setup.optimizers import AbsentParameters
from tests.spmd.packed import TIED, Stack, cut_over, cut_parameters, cuts_of, expected_part, mesh_of, packed_of

CPU = torch.device("cpu")
ALONE = mesh_of(1, 1)
# Modules of a `Stack` and the stages that call them.
_CALLS: Mapping[str, tuple[int, ...]] = {
    "words": (0,),
    "odd": (0,),
    "blocks.0": (0,),
    "blocks.1": (1,),
    "norm": (1,),
    "uneven": (1,),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A module, cut over a mesh, and its optimizer.

    Attributes:
        spec: The mesh.
        rank: This process' rank.
        module: The module.
        optimizer: Steps what this rank holds of it.
        presence: What the ranks of a pipeline have.
        recorded: All parameters of the optimizer, group by group.
    """

    spec: MeshSpec
    rank: int
    module: Stack
    optimizer: torch.optim.Optimizer
    presence: Presence | None = None
    recorded: Sequence[Members] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD if dist.is_initialized() else None

    def state(self) -> dict[str, Any]:
        """Returns the module's state as this rank holds it."""
        return module_state(self.module, self.layouts)

    def moments(self) -> dict[str, Any]:
        """Returns the optimizer's state by names."""
        return optimizer_state(
            self.module, self.optimizer, self.layouts, presence=self.presence, recorded=self.recorded
        )

    def save(self, path: Path, *, distributed: bool, **more: Any) -> None:
        """Saves a checkpoint."""
        checkpoint = {"state_dict": self.state(), "optimizer_states": [self.moments()], **more}
        layouts = every_name(self.module, self.layouts)
        state = CheckpointState.of(checkpoint, layouts=layouts, presence=self.presence)
        save(path, state, distributed=distributed, group=self.group)

    def load(self, path: Path) -> None:
        """Loads a checkpoint, strictly."""
        group, layouts = self.group, self.layouts
        stored = open_checkpoint(path, weights_only=None, group=group)
        load_module(stored, self.module, strict=True, group=group, layouts=layouts, presence=self.presence)
        load_optimizers(
            stored,
            self.module,
            [self.optimizer],
            group=group,
            layouts=layouts,
            presence=self.presence,
            recorded=[self.recorded],
        )

    def train(self, steps: range) -> None:
        """See `train`."""
        train(self.module, self.optimizer, self.spec, self.rank, steps)

    def check(self, steps: int) -> None:
        """See `check`."""
        absent = frozenset[str]() if self.presence is None else self.presence.absent
        check(self.module, self.optimizer, self.spec, self.rank, steps, absent=absent)


def build(spec: MeshSpec, rank: int, seed: int) -> Run:
    """Builds a module, cuts it over a mesh and makes an optimizer."""
    torch.manual_seed(seed)
    module = Stack().double()
    module.norm.bias.requires_grad_(False)
    presence = None
    if spec.pipeline > 1:
        presence = cut_in_stages(module, spec)
    elif spec != ALONE:
        cut_over(module, spec)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(()))])
    run = Run(
        spec=spec, rank=rank, module=module, optimizer=optimizer, presence=presence, layouts=packed_of(spec.tensor)
    )
    return stepped_by(run, two_groups)


def two_groups(module: Stack) -> torch.optim.Optimizer:
    """Makes an optimizer of what trains, in another order than the module's."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
    return torch.optim.AdamW([{"params": parameters[:4], "weight_decay": 0.3}, {"params": parameters[4:]}], lr=0.1)


def stepped_by(run: Run, make: Callable[[Stack], torch.optim.Optimizer]) -> Run:
    """Returns a run with an optimizer that was made while all parameters seemed to be there."""
    absent = AbsentParameters(run.module)
    with absent.shown(CPU):
        optimizer = make(run.module)
        recorded = members_of(run.module, optimizer)
    absent.take_out([optimizer])
    return replace(run, optimizer=optimizer, recorded=recorded)


def cut_in_stages(module: Stack, spec: MeshSpec) -> Presence:
    """Cuts a module over a mesh with a pipeline axis of two ranks."""
    mesh = build_device_mesh(spec, "cpu")
    group, plan = mesh["pipeline_parallel"].get_group(), plan_of(module)
    stages = apply_pipeline(module, plan, group.rank(), torch.device("cpu")).stages
    if spec.tensor > 1:
        cut_parameters(module, mesh["tensor_parallel"], cuts_of(spec.tensor))
    if spec.data > 1:
        for stage in stages.values():
            fully_shard(stage, mesh=data_mesh(mesh))
    return presence_of(plan, group, CPU)


def plan_of(module: nn.Module) -> PipelinePlan:
    """Returns a plan of two stages by hand."""
    holders = {name: (1,) for name, _ in module.named_parameters()}
    for name in holders:
        called = [stages for part, stages in _CALLS.items() if name.startswith(f"{part}.")]
        holders[name] = (0, 1) if name == TIED else called[0] if called else (1,)
    stages = tuple(Stage(index=index, rank=index, first=index, end=index + 1) for index in range(2))
    return PipelinePlan(
        schedule="1f1b",
        ranks=2,
        blocks=("blocks.0", "blocks.1"),
        stages=stages,
        holders=holders,
        modules=_CALLS,
        boundaries=((), ()),
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer, spec: MeshSpec, rank: int, steps: range) -> None:
    """Steps on gradients of which every rank holds its part; they depend on the name and the step alone."""
    for step in steps:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or parameter.is_meta:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            shape, layout = [*parameter.shape], cuts_of(spec.tensor).get(name)
            if layout is not None:
                shape[layout.dim] = layout.length
            whole = torch.randn(shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.to_local().copy_(expected_part(whole, spec, rank, layout))
            else:
                parameter.grad = whole
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state of a module and an optimizer after some steps on one process."""
    run = build(ALONE, 0, seed=1)
    run.train(range(steps))
    return run.state(), run.moments()["state"]


def equal(value: Any, whole: Tensor, spec: MeshSpec, rank: int, name: str) -> None:
    """Compares a rank's part with the whole tensor."""
    local = value.to_local() if isinstance(value, DTensor) else value
    part = expected_part(whole, spec, rank, cuts_of(spec.tensor).get(name)) if isinstance(value, DTensor) else whole
    torch.testing.assert_close(local, part, rtol=1e-12, atol=1e-12, msg=lambda text: f"{name}: {text}")


def check(
    module: Stack,
    optimizer: torch.optim.Optimizer,
    spec: MeshSpec,
    rank: int,
    steps: int,
    *,
    absent: Collection[str] = (),
) -> None:
    """Every rank holds its part of what one process would have, in weights and in AdamW's moments."""
    weights, moments = trained(steps)
    assert module.blocks[1].unequal.weight is module.blocks[0].unequal.weight
    for name, parameter in module.named_parameters():
        assert parameter.is_meta == (name in absent), name
        if name in absent:
            assert parameter not in optimizer.state
            continue
        equal(parameter.detach(), weights[name], spec, rank, name)
        assert (parameter in optimizer.state) == (name in moments)
        for key, value in optimizer.state.get(parameter, {}).items():
            equal(value, moments[name][key], spec, rank, name)
