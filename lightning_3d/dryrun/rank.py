"""One rank of a dry run: the plan applied without memory, and an optimizer step measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_3d.cost import TrafficRow
from lightning_3d.counters import (
    Category,
    CollectiveRow,
    CollectiveTable,
    LiveBytes,
    Owners,
    measure_peak,
    storage_key,
)
from lightning_3d.dryrun.buffers import missing_buffers, with_buffers
from lightning_3d.dryrun.memory import FakeMemory
from lightning_3d.dryrun.planned import Planned
from lightning_3d.dryrun.report import Padding, RankReport
from lightning_3d.dryrun.samples import Sampler
from lightning_3d.dryrun.sent import SentByMicrobatch
from lightning_3d.dryrun.steps import RankSteps, give_state, optimizers_on_rank
from lightning_3d.dryrun.world import fake_world
from lightning_3d.graph.fake_parameters import replace_by_fakes
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import Coordinate
from lightning_3d.parallel.data.cost import data_sizes, data_traffic
from lightning_3d.parallel.data.door import groups_of
from lightning_3d.parallel.data.plan import DataPlan
from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.timeline import Event, Timeline
from lightning_3d.plan import MeshEngine, Plan, apply_plan, watch_calls

_CPU = torch.device("cpu")
_PHASES: Mapping[str, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
)


def run_rank(planned: Planned, at: Coordinate, *, samples: int = 0) -> RankReport:
    """Plays one rank of a training and returns what it does in an optimizer step.

    Args:
        planned: The training and its plan.
        at: The rank's coordinate.
        samples: At how many moments of the step to look at what is alive.
    """
    begin = time.perf_counter()
    planned = planned.on(at.pipeline)
    training, spec = planned.training, planned.training.mesh
    rank = spec.rank(at)
    with fake_world(spec.world, rank) as world:
        mesh = build_device_mesh(spec, _CPU.type)
        module, memory = training.built(), FakeMemory()
        replace_by_fakes(module, memory.fake)
        with memory:
            found = _Played.begin(planned, module, mesh, world).measured(samples)
    pipeline = planned.plan.pipeline
    stages = () if pipeline is None else tuple(stage.index for stage in pipeline.stages_of(at.pipeline))
    buffers = missing_buffers(planned, at.pipeline)
    return replace(
        found,
        rank=rank,
        at=at,
        stages=stages,
        peak=with_buffers(found.peak, buffers),
        between_steps=found.between_steps + buffers,
        seconds=time.perf_counter() - begin,
    )


def stand_in_plan(plan: Plan) -> Plan:
    """Returns the plan that can be played: DistributedDataParallel reads memory, so its ranks run without it."""
    if plan.data.engine != "ddp":
        return plan
    return replace(plan, data=DataPlan(engine="none", zero_stage=0))


@dataclass(kw_only=True)
class _Played:
    """A rank whose plan was applied."""

    planned: Planned
    module: LightningModule
    mesh: DeviceMesh
    engine: MeshEngine
    optimizers: list[Optimizer]
    live: LiveBytes
    owned: Owners
    sent: SentByMicrobatch
    steps: RankSteps
    events: list[Event]

    @classmethod
    def begin(cls, planned: Planned, module: LightningModule, mesh: DeviceMesh, world: dist.ProcessGroup) -> _Played:
        training, plan = planned.training, stand_in_plan(planned.plan)
        policy = training.dtypes.fsdp_policy()
        engine = apply_plan(module, plan, mesh, world=world, device=_CPU, policy=policy, send_values=False)
        watch_calls(module, plan, engine, None, activation_checkpointing=training.config.activation_checkpointing)
        optimizers = optimizers_on_rank(module)
        give_state(optimizers)
        live, sent = LiveBytes(), SentByMicrobatch(mesh, planned)
        steps = RankSteps(
            planned,
            module,
            engine,
            optimizers,
            world=world,
            phase=partial(_computing, live, sent),
            keeps_gradients=planned.plan.data.engine == "ddp",
        )
        return cls(
            planned=planned,
            module=module,
            mesh=mesh,
            engine=engine,
            optimizers=optimizers,
            live=live,
            owned=Owners(_roots(module, engine), optimizers),
            sent=sent,
            steps=steps,
            events=[],
        )

    def measured(self, samples: int) -> RankReport:
        """Takes the step, and looks at what is alive at every new peak."""
        if self.engine.stages is not None:
            self.engine.stages.engine.watch(self._computing)
        sampler = Sampler(self.live, self.owners, samples)
        with self.live as live, _without_cycles():
            live.track(self.module, *self.optimizers, list(self.planned.parts))
            with self.sent.counter, sampler:
                peak = measure_peak(live, self.steps, self.owners)
            gc.collect()
            between = live.current
        return RankReport(
            rank=0,
            at=Coordinate(),
            between_steps=between,
            peak=peak,
            traffic=self._traffic(),
            padding=_padding(_roots(self.module, self.engine)),
            in_flight=self._in_flight(),
            samples=tuple(sampler.samples),
        )

    def owners(self) -> dict[int, Category]:
        """What each storage is for now."""
        stages = self.engine.stages
        buffers = () if stages is None else stages.engine.buffers
        return {**{storage_key(each): Category.COMMUNICATION for each in buffers}, **self.owned()}

    @contextmanager
    def _computing(self, action: Action) -> Iterator[None]:
        now = float(len(self.events))
        name = f"{_PHASES[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}"
        with _computing(self.live, self.sent, name, action.microbatch):
            yield
        self.events.append(Event(0, action, now, now + 1))

    def _in_flight(self) -> int:
        return int(Timeline(1, tuple(self.events)).in_flight(0)) if self.events else 1

    def _traffic(self) -> CollectiveTable:
        plan, counted = self.planned.plan, self.sent.of_all()
        if plan.data.engine != "ddp":
            return counted
        sizes = data_sizes(plan.parameters, plan.data, plan.mesh, policy=self.planned.training.dtypes.fsdp_policy())
        priced = data_traffic(plan.data, sizes, microbatches=len(self.planned.parts))
        return CollectiveTable(rows=(*map(_as_counted, priced.rows), *counted.rows))


def _roots(module: nn.Module, engine: MeshEngine) -> tuple[nn.Module, ...]:
    """The module, and the stages of it that the data axis shards."""
    return (module,) if engine.stages is None else (*engine.stages.engine.modules, module)


def _as_counted(row: TrafficRow) -> CollectiveRow:
    names = ("operation", "axis", "group_size", "calls", "payload", "wire")
    return CollectiveRow(**{name: getattr(row, name) for name in names})


@contextmanager
def _computing(live: LiveBytes, sent: SentByMicrobatch, name: str, microbatch: int | None) -> Iterator[None]:
    """Context of a part of a step, after which nothing lives on in cycles: when those go is up to Python."""
    with live.phase(name), sent.during(microbatch):
        yield
    gc.collect()


@contextmanager
def _without_cycles() -> Iterator[None]:
    """Context in which looking for cycles is quick: it leaves out all that exists already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _padding(roots: tuple[nn.Module, ...]) -> Padding:
    """What the units of FSDP2 hold on this rank, and equal shares of their parameters."""
    stored, needed = 0, 0.0
    for group in groups_of(part for root in roots for part in root.modules() if isinstance(part, FSDPModule)):
        shards = getattr(group.mesh_info, "shard_mesh_size", 1)
        for parameter in group.fsdp_params:
            shard = parameter._sharded_param_data
            stored += shard.nbytes
            needed += parameter._orig_size.numel() * shard.itemsize / shards
    return Padding(stored=stored, needed=needed)
