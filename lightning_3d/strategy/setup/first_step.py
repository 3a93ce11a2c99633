"""The first step of a run, for planning: the user's step on the first batch, which stays in its loader."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.batches.peek import first_batch
from lightning_3d.errors import BatchError
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.on_device import on_device
from lightning_3d.graph.quiet import quiet
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.strategy.faults.replicas import share_generators
from lightning_3d.strategy.run import RunOnMesh
from lightning_3d.strategy.setup.begun import BegunLoaders

_STAGES: Mapping[TrainerFn, str] = {
    TrainerFn.FITTING: "training",
    TrainerFn.VALIDATING: "validation",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}
_LOOPS: Mapping[str, str] = {
    "training": "fit_loop",
    "validation": "validate_loop",
    "test": "test_loop",
    "predict": "predict_loop",
}


class FirstStep:
    """Runs the step that a run is about to begin with, on its first batch.

    Loaders are asked for before the run does it, which is given the same ones; one that resumes asks once more.

    Attributes:
        method: Name of the module's method.
        args: Its arguments, the batch first.
        microbatches: In how many the batch was cut.
        begun: Gives back, when a loader is used, what had to be taken out of it.

    Args:
        trainer: The Trainer, its module connected and its data prepared.
        module: The module.
        precision: Gives the step its context, and batches their dtype.
        data_rank: This rank's position on the data axis, for the seeds of loaders' workers.
        cut: Cuts the batch; the step is run with the first micro-batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        precision: Mesh3DPrecision,
        *,
        data_rank: int,
        cut: MicroBatches | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._precision = precision
        self._data_rank = data_rank
        assert trainer.state.fn is not None, "a run has begun"
        self._stage = _STAGES[trainer.state.fn]
        self._loop: Any = getattr(trainer, _LOOPS[self._stage])
        self.begun = BegunLoaders()
        self.method = f"{self._stage}_step"
        batch, *rest = self._first_arguments()
        self.microbatches = 1
        if cut is not None:
            self.microbatches, batch = len(cut.sizes(batch)), cut.first(batch)
        self.args = (batch, *rest)

    def __call__(self) -> Any:
        """Runs the step and returns its output."""
        step: Callable[..., Any] = getattr(self._module, self.method)
        with self._precision.step_context(self._stage):
            return step(*self.args)

    def _first_arguments(self) -> tuple[Any, ...]:
        combined = self._loaders()
        batches = []
        for loader in combined.flattened:
            # Its workers may start now.
            _auto_add_worker_init_fn(loader, self._data_rank)
            batch, begun = first_batch(loader)
            if batch is None:
                raise BatchError(
                    f"the first {self._stage} loader has no batch, and the plan of this mesh is made from one.",
                    fix="check the dataset and the batch size",
                )
            if begun is not loader:
                self.begun.keep(loader, begun)
            batches.append(batch)
        return self._arguments(combined, batches)

    def _loaders(self) -> CombinedLoader:
        source = self._loop._data_source
        given = _request_dataloader(source)
        # What a checkpoint brings back to its owner may change what a loader is.
        if source.is_module() and self._trainer.ckpt_path is None:
            _give_once_more(source.instance, source.name, given)
        if isinstance(given, CombinedLoader):
            return given
        return CombinedLoader(given, "max_size_cycle" if self._stage == "training" else "sequential")

    def _arguments(self, combined: CombinedLoader, batches: list[Any]) -> tuple[Any, ...]:
        several = combined._mode == "sequential"
        batch = batches[0] if several else tree_unflatten(batches, combined._spec)
        batch = self._transferred(batch)
        if self._stage == "training":
            return tuple(self._loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())
        number = 0 if several and len(batches) > 1 else None
        kwargs = self._loop._build_kwargs(batch, 0, number)
        return tuple(self._loop._build_step_args_from_hook_kwargs(kwargs, self.method))

    def _transferred(self, batch: Any) -> Any:
        """What the user's hooks make of a batch on its way to the device; nothing remains of their calls."""
        # They may write to its tensors, and the loop gives them this batch once more.
        batch = apply_to_collection(batch, Tensor, Tensor.clone)
        with quiet(self._module, getattr(self._trainer, "datamodule", None)):
            batch = self._precision.convert_input(batch)
            batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
            return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def take_first_step(
    module: LightningModule,
    run: RunOnMesh,
    precision: Mesh3DPrecision,
    *,
    data_rank: int,
    cut: MicroBatches | None,
    needed: bool,
) -> FirstStep | None:
    """Takes the first batch of a run whose module is still whole, and makes the summaries that need it whole.

    All ranks call it: those that see the same data draw the same random numbers from here on.

    Args:
        module: The module, its Trainer connected.
        run: The mesh of this process.
        precision: See `FirstStep`.
        data_rank: See `FirstStep`.
        cut: See `FirstStep`.
        needed: Whether the mesh is planned by it; else there may be no batch, and None is returned.

    Raises:
        BatchError: There is no batch, and one is needed.
    """
    share_generators(run.model_group)
    with on_device(module, run.device):
        try:
            step = FirstStep(module.trainer, module, precision, data_rank=data_rank, cut=cut)
        except BatchError:
            if needed:
                raise
            return None
        run.callbacks.summaries.make(module)
    return step


def _give_once_more(owner: object, name: str, loaders: Any) -> None:
    """Has the next call of a hook return what it has returned already; then it is the user's own again."""

    def give() -> Any:
        put_back()
        return loaders

    put_back = shadow(owner, name, give)
