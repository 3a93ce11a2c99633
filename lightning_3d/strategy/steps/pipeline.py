"""One batch through the stages of a pipeline: a schedule runs the user's step on its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_3d.batches.prints import say
from lightning_3d.errors import BatchError, ModuleError, PlanError
from lightning_3d.log import get_logger
from lightning_3d.parallel.data.engine import explained
from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.random.seeds import derive_seed
from lightning_3d.strategy.logging.collectives import DataCollectives
from lightning_3d.strategy.logging.relay import Relay
from lightning_3d.strategy.steps.attributes import StepAttributes
from lightning_3d.strategy.steps.outputs import are_seen
from lightning_3d.strategy.steps.pipeline_batch import BatchLoss, PipelinedBatch, StepOutcome, kinds_of
from lightning_3d.strategy.steps.runner import BatchRunner, RunnerParts
from lightning_3d.strategy.steps.whole import to_go_back_from

_log = get_logger(__name__)
_TRAINING = "training_step"


class PipelineRunner(BatchRunner):
    """Runs the steps of a module whose blocks lie on several ranks.

    Forward and backward of all micro-batches run inside ``training_step``, and the later ``backward`` only fires the
    hooks. Outputs and logged values come from the last stage to all ranks.

    Args:
        parts: What every runner works with.
        pipeline: Runs the schedule.
        relay: Sends what the last stage has found.
        attributes: What steps change in the module.
        collectives: Reductions over the data axis.
        finishes_some: This rank owns the last stage and others.
    """

    def __init__(
        self,
        parts: RunnerParts,
        *,
        pipeline: PipelineEngine,
        relay: Relay,
        attributes: StepAttributes,
        collectives: DataCollectives,
        finishes_some: bool,
    ) -> None:
        super().__init__(parts)
        self._pipeline = pipeline
        self._relay = relay
        self._attributes = attributes
        self._collectives = collectives
        self._finishes_some = finishes_some
        # Steps of evaluation that no schedule can run.
        self._together: set[str] = set()

    # ---- training ----

    @explained()
    def training_step(self, *args: Any) -> Any:
        """See `BatchRunner`."""
        self._begin_training_step()
        trains = self._goes_backward
        if trains and self._opens_window:
            self._aside.make_room()
        with self._metrics.alone():
            batch = self._prepared(_TRAINING, args, self._position, self._precision.train_step_context)
            loss = BatchLoss(batch, self._accumulation, self._precision.scaled)
            run = partial(self._pipeline.evaluate, batch.step, batch.signatures)
            if trains:
                self._engine.before_microbatch(last=not self.accumulating, backwards=batch.count)
                run = partial(self._pipeline.train, batch.step, loss, batch.signatures)
            self._attributes.begin()
            results = self._engine.scheduled(run)
        if trains:
            self._aside.put_aside()

        def outcome() -> StepOutcome:
            loss.check()
            return batch.outcome(results, self._attributes.changed())

        told = self._relay.share(outcome, large=are_seen(self._module, "train"))
        self._attributes.finish(told.attributes)
        for weight in told.weights:
            self._window.add(weight)
        self._log(told)
        return to_go_back_from(told.output)

    @explained()
    def backward(self, loss: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """Brings the gradients of the step, and fires the hooks."""
        return self._aside.bring(loss)

    def after_optimizer_step(self) -> None:
        """Nothing to do: no step is running."""

    def synchronise(self, synced: bool) -> None:
        """See `BatchRunner`."""
        self.accumulating = not synced

    # ---- evaluation ----

    @explained()
    def evaluation_step(self, stage: str, context: Callable[[], AbstractContextManager[Any]], *args: Any) -> Any:
        """See `BatchRunner`; a step that no schedule can run is run by all ranks of the pipeline together."""
        method = f"{stage}_step"
        position = derive_seed(self._position, stage, *args[1:])
        if method not in self._together:
            with self._metrics.alone():
                batch = self._prepared_if_possible(method, args, position, context)
                if batch is not None:
                    self._attributes.begin()
                    results = self._engine.scheduled(partial(self._pipeline.evaluate, batch.step, batch.signatures))
                    self._engine.rest()
            if batch is not None:
                told = self._relay.share(
                    lambda: batch.outcome(results, self._attributes.changed()), large=are_seen(self._module, stage)
                )
                self._attributes.finish(told.attributes)
                self._log(told)
                return told.output
        with context(), self._stream(position, 0, 1):
            return self._engine.visit(partial(getattr(self._module, method), *args))

    def _prepared_if_possible(
        self, method: str, args: tuple[Any, ...], position: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> PipelinedBatch | None:
        """The batch, if a schedule can run the step; all data ranks decide alike, once for each step."""
        try:
            return self._prepared(method, args, position, context)
        except (BatchError, ModuleError, PlanError) as error:
            self._together.add(method)
            _log.debug("%s runs on all stages together, not in a schedule: %s", method, error)
            return None

    # ---- batches ----

    def _prepared(
        self, method: str, args: tuple[Any, ...], position: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> PipelinedBatch:
        """Cuts a batch and has the ways of its micro-batches recorded, where one is new on any data rank.

        A recording gathers parameters, and the step may do so with values: data ranks must do it together.
        """
        sizes = self._batches.sizes(args[0])
        parts = self._batches.split(args[0], sizes)
        rest = tuple(args[1:])
        kinds = kinds_of(self._module, method, parts, sizes, rest)
        new = self._pipeline.unseen(kinds)
        count, most = self._collectives.largest([len(parts), len(new)])
        batch = PipelinedBatch(
            module=self._module,
            run=self._engine.run,
            method=method,
            parts=parts,
            sizes=sizes,
            kinds=kinds,
            rest=rest,
            count=count,
            around=partial(self._around, context, position, count),
            kept={},
            said={},
        )
        for index in (*new, *[0] * (most - len(new))):
            self._engine.visit_part(partial(self._pipeline.learn, partial(batch.step, index), kinds[index]))
        return batch

    @contextmanager
    def _around(
        self, context: Callable[[], AbstractContextManager[Any]], position: int, count: int, index: int
    ) -> Iterator[None]:
        stage = self._attributes.stage(index)
        with context(), self._stream(position, index, count), stage, self._metrics.microbatch(index):
            if not self._finishes_some:
                yield
                return
            with self._metrics.counting_if_finished():
                yield

    def _log(self, told: StepOutcome) -> None:
        for call in told.logs:
            call.make(self._module)
        say(self._module.print, told.lines)
