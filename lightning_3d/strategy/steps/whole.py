"""One batch through the user's step: whole, or cut into micro-batches with forward and backward of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor

from lightning_3d.batches.join import join_outputs
from lightning_3d.batches.logs import LogCall, LogCollector
from lightning_3d.batches.prints import SaidLines, lines_of_batch, say
from lightning_3d.batches.weights import LOSS, loss_of, shares, weight_of
from lightning_3d.errors import ModuleError
from lightning_3d.graph.calls import shadow
from lightning_3d.parallel.data.engine import explained
from lightning_3d.random.seeds import derive_seed
from lightning_3d.strategy.steps.runner import BatchRunner


class StepRunner(BatchRunner):
    """Runs the steps of a module whose every rank holds all blocks.

    With one micro-batch a training step is Lightning's plain path. With more, forward and backward of all of them run
    inside ``training_step``, and the later ``backward`` only fires the hooks.
    """

    # Set by a training step for the backward that Lightning calls after it.
    _loss_factor: float | None = None
    _inside_step = False

    # ---- training ----

    @explained()
    def training_step(self, *args: Any) -> Any:
        """See `BatchRunner`."""
        self._loss_factor = None
        self._begin_training_step()
        sizes = self._batches.sizes(args[0])
        if len(sizes) > 1:
            return self._microbatches(args, sizes)
        self._engine.before_microbatch(last=not self.accumulating)
        self._inside_step = True
        try:
            output = self._train_one(args, 0, 1)
        finally:
            self._inside_step = False
        if self._module.automatic_optimization:
            weight = weight_of(output)
            self._window.add(weight)
            # Lightning has divided by the accumulation, a weighted window is divided once, at its end.
            self._loss_factor = None if weight is None else weight * self._accumulation
        return output

    @explained()
    def backward(self, loss: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """See `BatchRunner`."""
        if self._aside.waiting:
            return self._aside.bring(loss)
        if not self._inside_step:
            return plain(loss if self._loss_factor is None else loss * self._loss_factor)
        result = plain(self._engine.before_inner_backward(loss))
        self._engine.after_inner_backward()
        return result

    def after_optimizer_step(self) -> None:
        """Lets a step that is still running (manual optimization) see the new weights."""
        if self._inside_step:
            self._engine.after_inner_backward()

    def synchronise(self, synced: bool) -> None:
        """See `BatchRunner`; also while a step runs (manual optimization)."""
        self.accumulating = not synced
        if self._inside_step:
            self._engine.before_microbatch(last=synced)

    # ---- evaluation ----

    @explained()
    def evaluation_step(self, stage: str, context: Callable[[], AbstractContextManager[Any]], *args: Any) -> Any:
        """See `BatchRunner`."""
        step = getattr(self._module, f"{stage}_step")
        sizes = self._batches.sizes(args[0])
        position = derive_seed(self._position, stage, *args[1:])
        if len(sizes) == 1:
            with context(), self._stream(position, 0, 1):
                return self._engine.visit(lambda: step(*args))
        outputs = []
        with self._collecting(sizes) as at:
            for index, part in enumerate(self._batches.split(args[0], sizes)):
                at(index)
                with context(), self._stream(position, index, len(sizes)):
                    outputs.append(self._engine.visit(partial(step, part, *args[1:])))
        return join_outputs(outputs, sizes=sizes, shares=shares(sizes))

    # ---- micro-batches ----

    def _microbatches(self, args: Sequence[Any], sizes: Sequence[int]) -> Any:
        if not self._module.automatic_optimization:
            raise ModuleError(
                f"manual optimization steps its optimizers itself, so its batch of {sum(sizes)} samples cannot be cut "
                f"into {len(sizes)} micro-batches.",
                fix="num_microbatches=1 and micro_batch_size=null",
            )
        if not self._goes_backward:
            return self._forward_alone(args, sizes)
        if self._opens_window:
            self._aside.make_room()
        outputs, weights = [], []
        parts = [share / self._accumulation for share in shares(sizes)]
        with self._collecting(sizes) as at:
            for index, part in enumerate(self._batches.split(args[0], sizes)):
                self._engine.before_microbatch(last=not self.accumulating and index == len(sizes) - 1)
                at(index)
                output = self._train_one((part, *args[1:]), index, len(sizes))
                weight = weight_of(output)
                self._window.add(weight)
                weights.append(weight)
                self._go_backward(output, parts[index] if weight is None else weight)
                outputs.append(detached(output))
        self._aside.put_aside()
        return to_go_back_from(join_outputs(outputs, sizes=sizes, shares=output_shares(sizes, weights)))

    def _forward_alone(self, args: Sequence[Any], sizes: Sequence[int]) -> Any:
        outputs = []
        with self._collecting(sizes) as at:
            for index, part in enumerate(self._batches.split(args[0], sizes)):
                at(index)
                outputs.append(detached(self._train_one((part, *args[1:]), index, len(sizes))))
        return join_outputs(outputs, sizes=sizes, shares=shares(sizes))

    @contextmanager
    def _collecting(self, sizes: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Collects what the micro-batches log, ``log_dict`` included, and print, and tells it once at the end.

        Yields:
            A function to be told which micro-batch runs next.
        """
        collector, current = LogCollector(), [0]
        said = [SaidLines() for _ in sizes]

        def collect(*args: Any, **options: Any) -> None:
            collector.add(LogCall.of(self._module, *args, **options), sizes[current[0]])

        def keep(*args: Any, **options: Any) -> None:
            said[current[0]].add(*args, **options)

        with ExitStack() as at_end, ExitStack() as inside:
            at_end.callback(shadow(self._module, "log", collect))
            at_end.callback(shadow(self._module, "print", keep))

            def begin(index: int) -> None:
                current[0] = index
                inside.close()
                inside.enter_context(self._metrics.microbatch(index))

            yield begin
        say(self._module.print, lines_of_batch([part.lines for part in said]))
        for call in collector.combined():
            call.make(self._module)

    def _train_one(self, args: Sequence[Any], index: int, count: int) -> Any:
        with self._precision.train_step_context(), self._stream(self._position, index, count):
            return self._engine.run(self._module.training_step, *args)

    def _go_backward(self, output: Any, factor: float) -> None:
        loss = loss_of(output)
        if loss is None:
            raise no_loss()
        with self._engine.backward():
            self._module.backward(self._precision.scaled(loss * factor))


def no_loss() -> ModuleError:
    """Returns the error of a step that returned no loss for a micro-batch."""
    return ModuleError(
        "training_step returned no loss for a micro-batch.",
        valid='a tensor, or a mapping with "loss"',
        fix="return a loss for every batch, or num_microbatches=1",
    )


def output_shares(sizes: Sequence[int], weights: Sequence[float | None]) -> list[float]:
    """Returns the part of each micro-batch in the mean of what the step returned.

    Args:
        sizes: Samples of each.
        weights: The ``loss_weight`` of each, or None.
    """
    return shares(sizes if None in weights else [float(weight or 0) for weight in weights])


def to_go_back_from(output: Any) -> Any:
    """Returns what a step returned, its loss one that hooks may ask for a gradient, as they may the user's."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_()
    if isinstance(output, MutableMapping) and isinstance(output.get(LOSS), Tensor):
        output[LOSS] = output[LOSS].detach().requires_grad_()
    return output


def detached(output: Any) -> Any:
    """Returns what a step returned without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    return recursive_detach(output) if isinstance(output, dict) else output
