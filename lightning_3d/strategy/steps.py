"""One batch through the user's step: whole, or cut into micro-batches with forward and backward of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_3d.batches.join import join_outputs
from lightning_3d.batches.logs import LogCollector
from lightning_3d.batches.split import slice_sizes, split_batch, split_by_module
from lightning_3d.batches.weights import WeightedWindow, loss_of, shares, weight_of
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import BatchError, ModuleError
from lightning_3d.gradients import scale_gradients
from lightning_3d.graph.calls import shadow
from lightning_3d.parallel.data.engine import explained
from lightning_3d.plan import MeshEngine
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.random.seeds import derive_seed
from lightning_3d.random.streams import RandomStreams

_STEP_STREAM = "step"


class StepRunner:
    """Runs the steps of a module for Lightning's loops.

    With one micro-batch a training step is Lightning's plain path. With more, forward and backward of all of them run
    inside ``training_step``, and the later ``backward`` only fires the hooks.

    Args:
        module: The user's module.
        engine: Runs its steps on the mesh.
        precision: Contexts and the loss scale.
        config: The strategy's options.
        streams: Random streams, or None for torch's generator alone.
        data_group: The data axis.
        trained: Returns the parameters of all optimizers.
        share_buffers: Gives every data rank the running statistics of the first; called once per optimizer step.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: MeshEngine,
        precision: Mesh3DPrecision,
        *,
        config: StrategyConfig,
        streams: RandomStreams | None,
        data_group: dist.ProcessGroup,
        trained: Callable[[], list[Tensor]],
        share_buffers: Callable[[], None],
    ) -> None:
        self._module = module
        self._engine = engine
        self._precision = precision
        self._config = config
        self._streams = streams
        self._group = data_group
        self._trained = trained
        self._share_buffers = share_buffers
        self._collector = LogCollector(module)
        self._window = WeightedWindow()
        self.accumulating = False
        # Set by a training step for the backward that Lightning calls after it.
        self._loss_factor: float | None = None
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None
        self._inside_step = False

    # ---- training ----

    @explained()
    def training_step(self, *args: Any) -> Any:
        """Returns the output of the user's ``training_step`` for a whole batch; its gradients come with `backward`."""
        self._loss_factor, self._gradients = None, None
        if self._opens_window():
            self._share_buffers()
        sizes = self._sizes(args[0])
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
        """Runs or completes the backward of the last step.

        Args:
            loss: What Lightning goes backward from: the loss divided by ``accumulate_grad_batches``, or the user's
                in manual optimization.
            plain: Lightning's own backward, hooks included.
        """
        if self._gradients is not None:
            return self._restore_gradients(loss)
        if not self._inside_step:
            return plain(loss if self._loss_factor is None else loss * self._loss_factor)
        result = plain(self._engine.before_inner_backward(loss))
        self._engine.after_inner_backward()
        return result

    def gradients_arrived(self) -> None:
        """Called between a backward and the hooks that see its gradients."""
        if not self.accumulating:
            self._engine.gradients_arrived()

    def before_optimizer_step(self) -> None:
        """Divides the gradients of a weighted window once, before hooks and clipping see them."""
        self._engine.gradients_complete()
        factor = self._window.gradient_factor(self._group, self._module.device)
        if factor is not None:
            scale_gradients(self._trained(), factor)

    def after_optimizer_step(self) -> None:
        """Lets a step that is still running (manual optimization) see the new weights."""
        if self._inside_step:
            self._engine.after_inner_backward()

    def synchronise(self, synced: bool) -> None:
        """Says, while a step runs (manual optimization), whether its next backward meets the other data ranks."""
        self.accumulating = not synced
        if self._inside_step:
            self._engine.before_microbatch(last=synced)

    # ---- evaluation ----

    @explained()
    def evaluation_step(self, stage: str, context: Callable[[], AbstractContextManager[Any]], *args: Any) -> Any:
        """Returns the output of ``{stage}_step`` for a whole batch.

        Args:
            stage: "validation", "test" or "predict".
            context: Lightning's precision context of that step.
            args: Batch, batch index and, with several loaders, their index.
        """
        step = getattr(self._module, f"{stage}_step")
        sizes = self._sizes(args[0])
        position = derive_seed(self._position, stage, *args[1:])
        if len(sizes) == 1:
            with context(), self._stream(position, 0, 1):
                return self._engine.visit(lambda: step(*args))
        outputs = []
        with self._collecting():
            for index, part in enumerate(self._split(args[0], sizes)):
                self._collector.microbatch(sizes[index])
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
        before = self._set_gradients_aside()
        outputs, weights = [], []
        parts = [shares(sizes)[index] / self._accumulation for index in range(len(sizes))]
        with self._collecting():
            for index, part in enumerate(self._split(args[0], sizes)):
                self._engine.before_microbatch(last=not self.accumulating and index == len(sizes) - 1)
                self._collector.microbatch(sizes[index])
                output = self._train_one((part, *args[1:]), index, len(sizes))
                weight = weight_of(output)
                self._window.add(weight)
                weights.append(weight)
                self._go_backward(output, parts[index] if weight is None else weight)
                outputs.append(_detached(output))
        self._gradients = [(parameter, parameter.grad) for parameter in self._trained()]
        self._put_back(before)
        weighted = shares(sizes if None in weights else [float(weight or 0) for weight in weights])
        return join_outputs(outputs, sizes=sizes, shares=weighted)

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Collects what the micro-batches log, ``log_dict`` included, and logs it once at the end."""
        put_back = shadow(self._module, "log", self._collector.collect)
        try:
            yield
        finally:
            put_back()
        self._collector.flush()

    def _train_one(self, args: Sequence[Any], index: int, count: int) -> Any:
        with self._precision.train_step_context(), self._stream(self._position, index, count):
            return self._engine.run(self._module.training_step, *args)

    def _go_backward(self, output: Any, factor: float) -> None:
        loss = loss_of(output)
        if loss is None:
            raise ModuleError(
                "training_step returned no loss for a micro-batch.",
                valid='a tensor, or a mapping with "loss"',
                fix="return a loss for every batch, or num_microbatches=1",
            )
        with self._engine.backward():
            self._module.backward(self._precision.scaled(loss * factor))

    def _set_gradients_aside(self) -> list[tuple[Tensor, Tensor | None]] | None:
        """Makes room for a new window: Lightning zeroes gradients only after the step, which has its own by then.

        The old ones are kept only for a module with its own idea of zeroing; torch's buckets would overwrite them.
        """
        if not self._opens_window():
            return None
        keep = is_overridden("optimizer_zero_grad", self._module)
        before = []
        for parameter in self._trained():
            old = parameter.grad
            before.append((parameter, old.clone() if keep and old is not None else None))
            parameter.grad = None
        return before

    def _put_back(self, before: list[tuple[Tensor, Tensor | None]] | None) -> None:
        for parameter, gradient in before or ():
            parameter.grad = gradient

    def _restore_gradients(self, loss: Tensor) -> Tensor:
        """The backward that Lightning calls when all micro-batches are through: gradients appear, hooks fire."""
        assert self._gradients is not None
        loss = self._precision.pre_backward(loss, self._module)
        for parameter, gradient in self._gradients:
            kept = parameter.grad
            if gradient is None or kept is gradient:
                continue
            parameter.grad = gradient if kept is None else gradient + kept
        self._gradients = None
        return self._precision.post_backward(loss, self._module)

    # ---- where we are ----

    def _opens_window(self) -> bool:
        """Whether this batch is the first after an optimizer step, by Lightning's count; a step need not take it."""
        return int(self._module.trainer.fit_loop.epoch_loop.batch_idx) % self._accumulation == 0

    @property
    def _accumulation(self) -> int:
        return int(self._module.trainer.accumulate_grad_batches)

    @property
    def _position(self) -> int:
        """Number of training batches so far: restored with the loops, so a resumed run goes on with its streams."""
        return int(self._module.trainer.fit_loop.epoch_loop.total_batch_idx)

    def _stream(self, position: int, index: int, count: int) -> AbstractContextManager[None]:
        if self._streams is None:
            return nullcontext()
        self._streams.at(step=position, microbatch=self._group.rank() * count + index)
        return self._streams.stream(_STEP_STREAM)

    def _sizes(self, batch: Any) -> tuple[int, ...]:
        config = self._config
        if config.micro_batch_size is None and config.num_microbatches in ("auto", 1):
            return (1,)
        size = _batch_size(batch)
        by_size = -(-size // config.micro_batch_size) if config.micro_batch_size else 1
        asked = config.num_microbatches if isinstance(config.num_microbatches, int) else None
        if asked is not None and config.micro_batch_size and by_size > asked:
            raise BatchError(
                f"a batch of {size} samples makes {by_size} micro-batches of micro_batch_size="
                f"{config.micro_batch_size}, but num_microbatches={asked}.",
                valid=f"num_microbatches={by_size}, or one of the two left out",
            )
        return slice_sizes(size, by_size if config.micro_batch_size else asked or 1)

    def _split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        own = getattr(self._module, "split_batch", None)
        return split_by_module(own, batch, len(sizes)) if callable(own) else split_batch(batch, sizes)


def _batch_size(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except MisconfigurationException as error:
        raise BatchError(
            f"no batch size can be found in a batch of type {type(batch).__name__}, so it cannot be cut.",
            valid="tensors with the batch size as first dim, in any mapping, list, tuple or dataclass",
            fix="define split_batch(batch, n) in the module, or num_microbatches=1",
        ) from error


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return recursive_detach(output) if isinstance(output, dict) else output
