"""Evaluation steps: a batch, and what a data rank does when the others have one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.strategy.data.ends import LoaderEnds
from lightning_3d.strategy.logging.logged import LoggedValues
from lightning_3d.strategy.steps.runner import BatchRunner

_STAGE_OF_RUN: Mapping[str, str] = {"predict": "predict", "test": "test"}


class Evaluator:
    """Runs validation, test and predict steps of a module.

    Args:
        module: The user's module.
        steps: Runs one batch.
        ends: Knows which data ranks have fewer batches.
        precision: Gives each step its context.
        logged: Makes what is logged equal on all ranks.
    """

    def __init__(
        self,
        module: LightningModule,
        steps: BatchRunner,
        *,
        ends: LoaderEnds,
        precision: Mesh3DPrecision,
        logged: LoggedValues,
    ) -> None:
        self._module = module
        self._steps = steps
        self._ends = ends
        self._precision = precision
        self._logged = logged

    def step(self, stage: str, args: tuple[Any, ...]) -> Any:
        """Returns the output of a batch; this rank's last one runs again, unseen, while others have more.

        Args:
            stage: "validation", "test" or "predict".
            args: Batch, batch index and, with several loaders, their index.
        """
        output = self._steps.evaluation_step(stage, partial(self._precision.step_context, stage), *args)
        self._logged.batch_ran()
        loop: Any = self._module.trainer._active_loop
        # A step that takes the batch alone has one loader, whose batches the loop counts.
        position = args[1:] or (loop.batch_progress.current.ready - 1,)
        repeats = self._ends.repeats_after(*position)
        if repeats:
            # The hooks of this batch come first, as on the ranks that have more, where hooks send too.
            self._logged.after_batch(partial(self._keep_up, stage, args, repeats))
        return output

    def repeat(self, batch: Any, position: tuple[int, ...], to_device: Callable[[Any], Any]) -> None:
        """Runs a batch unseen that came straight from a loader of unknown length.

        Args:
            batch: As the loader gave it.
            position: Batch index and, with several loaders, their index.
            to_device: Moves it.
        """
        running = self._module.trainer.state.stage
        assert running is not None, "loaders are read while a loop runs"
        stage = _STAGE_OF_RUN.get(running.value, "validation")
        self._unseen(stage, (to_device(self._precision.convert_input(batch)), *position))

    def _keep_up(self, stage: str, args: tuple[Any, ...], repeats: int) -> None:
        for _ in range(repeats):
            if self._module.trainer.received_sigterm:
                # Where the other ranks leave, which have a batch before them.
                raise SIGTERMException
            self._unseen(stage, args)
            self._logged.answer_signals()

    def _unseen(self, stage: str, args: tuple[Any, ...]) -> None:
        with self._ends.unseen(self._module):
            self._steps.evaluation_step(stage, partial(self._precision.step_context, stage), *args)
            self._logged.batch_ran()
            self._logged.batch_ends()
