"""The runs of a cut module on one rank: the door around its calls, and what stands behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.errors import Lightning3DError, ModuleError
from lightning_3d.graph.attributes import Attributes
from lightning_3d.graph.calls import Call, Handler, shadow
from lightning_3d.graph.compiled import compiled_parts
from lightning_3d.graph.quiet import quiet
from lightning_3d.graph.stand_ins import without_metrics
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.record.attributes import attributes_explained, failed_before
from lightning_3d.parallel.pipeline.record.recorder import Recorder
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.run.agreement import check_record, digest
from lightning_3d.parallel.pipeline.run.exchange import Exchange
from lightning_3d.parallel.pipeline.run.functions import ParameterNames
from lightning_3d.parallel.pipeline.run.hooks import UserHooks
from lightning_3d.parallel.pipeline.run.placeholder import values_of
from lightning_3d.parallel.pipeline.run.shared_run import SharedRun
from lightning_3d.parallel.pipeline.run.site import Site
from lightning_3d.parallel.pipeline.run.stage_run import StageRun
from lightning_3d.random.streams import RandomStreams
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.hook_values import without_hook_values

_Result = TypeVar("_Result")
_NO_GRAPH_TASK = -1


class PipelineRuns:
    """Runs the user's code on a module of which each rank of a pipeline has a part.

    Args:
        module: The module, after the plan was applied to it.
        plan: The plan.
        rank: This rank's place on the pipeline axis.
        group: The pipeline axis' ranks of this data and tensor position.
        hooks: `forward_hooks` of the module before anything rewrote it; later ones of the user are found.
        device: This rank's device.
        streams: Random streams; None leaves randomness to torch's generator.
        tensor_group: The tensor axis; None where its degree is 1.
    """

    def __init__(
        self,
        module: LightningModule,
        plan: PipelinePlan,
        rank: int,
        group: dist.ProcessGroup,
        *,
        hooks: Mapping[str, frozenset[int]],
        device: torch.device,
        streams: RandomStreams | None = None,
        tensor_group: ShardGroup | None = None,
    ) -> None:
        self._module = module
        self._attributes = Attributes(module, plan.blocks)
        self._site = Site(
            module=module,
            plan=plan,
            rank=rank,
            group=group,
            device=device,
            hooks=UserHooks(module, hooks),
            names=ParameterNames(module, leaves=tensor_group is not None),
            streams=streams,
            tensor_group=tensor_group,
            compiled=bool(compiled_parts(module)),
        )
        self._exchange = Exchange(
            group=group, rank=rank, device=device, modules=dict(module.named_modules()), tensor_group=tensor_group
        )
        # Backward runs in threads of torch, which see no run.
        self._active = threading.local()

    def around(self, name: str) -> Handler:
        """Returns the handler of a watched module's calls; it stands outside of everything else."""

        def handler(call: Call) -> Any:
            if torch._C._current_graph_task_id() != _NO_GRAPH_TASK:
                # A checkpoint runs it again, with the arguments that it had.
                return call.function(*values_of(call.args, name), **values_of(call.kwargs, name))
            run = self._run
            return self.shared(lambda: self.around(name)(call)) if run is None else run.call(name, call)

        return handler

    def run_stage(
        self, stage: int, received: tuple[Tensor, ...], record: StepRecord, step: Callable[[], _Result]
    ) -> tuple[Tensor, ...] | _Result:
        """Runs a step on a stage, for one micro-batch.

        Args:
            stage: Number of the stage.
            received: A tensor for each value of its boundary, in the record's order; of shards the local part.
            record: What the step does with an input of this kind.
            step: Calls the user's step.

        Returns:
            The same for the next stage; of the last stage what the step returns.

        Raises:
            ModuleError: The step does something else than what was recorded.
        """
        assert self._run is None, "a stage runs by itself"
        self._site.look_again()
        run = StageRun(self._site, self._site.plan.stages[stage], received, record)
        try:
            return self._during(run, lambda: run.run(step))
        except Lightning3DError:
            raise
        except Exception as error:
            if run.began:
                raise
            raise failed_before(stage, error) from error

    def shared(self, call: Callable[[], _Result]) -> _Result:
        """Runs code on all ranks of the pipeline, which all have to come here; inside of another run as it is.

        Every module is computed by the rank that owns it. No gradients come back.
        """
        if self._run is not None:
            return call()
        self._site.look_again()
        run = SharedRun(self._site, self._exchange)
        return self._during(run, lambda: run.run(call))

    def record(self, step: Callable[[], Any]) -> StepRecord:
        """Returns what a step does with an input of a kind that has not been seen before.

        All ranks run it together, in the caller's mode of gradients; it leaves no trace.

        Raises:
            ModuleError: The step does what stages cannot share out, or other things on other ranks.
            PlanError: It uses what the plan has put elsewhere.
        """
        assert self._run is None, "recorded outside of runs"
        self._site.look_again()
        plan, module = self._site.plan, self._module
        recorder = Recorder(
            blocks=frozenset(plan.blocks),
            tracked=frozenset(plan.modules) - frozenset(plan.blocks),
            parameters={name: self._site.names.below(module.get_submodule(name)) for name in plan.modules},
            parameter_name=self._site.names,
        )
        run = SharedRun(self._site, self._exchange, recorder)

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            recorder.used(value)

        with quiet(module, keep_log=True), without_metrics(module):
            put_back = shadow(module, "log", log)
            before = self._attributes.now()
            try:
                output = self._during(run, lambda: run.run(step))
                recorder.kept([change.content for change in before.changes()])
            finally:
                put_back()
        record = recorder.finish(output)
        # A rank that differs would leave the others waiting, and would tell of the plan.
        if len(set(self._exchange.agree(digest(record)))) > 1:
            raise ModuleError(
                "the ranks of a pipeline do different things with the same batch.",
                fix="let the step depend on the batch and on parameters only, not on the rank or the time",
            )
        check_record(record, plan)
        return record

    @property
    def in_step(self) -> bool:
        """Whether a step runs on a stage or is recorded: the ranks are, or will be, in different places of it."""
        run = self._run
        return isinstance(run, StageRun) or (run is not None and run.is_recorded)

    @property
    def _run(self) -> StageRun | SharedRun | None:
        return getattr(self._active, "run", None)

    def _during(self, run: StageRun | SharedRun, call: Callable[[], _Result]) -> _Result:
        self._active.run = run
        try:
            with without_hook_values(), attributes_explained(self._module, self._site.plan.modules):
                return call()
        finally:
            self._active.run = None
