"""What a dry run is told of a training, and the module of it without values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ModuleError
from lightning_3d.graph.parameters import class_name
from lightning_3d.initial.record import InitRecorder
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.precision import Mesh3DPrecision

_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training that is not run.

    Attributes:
        make: Builds the user's module; called once for each rank that is played, and once for the plan.
        batch: What the DataLoader of one data rank gives for a step.
        mesh: Degrees of the axes.
        config: The strategy's options.
        precision: A name of `PRECISIONS`, as `Trainer(precision=...)` takes them, or "bf16-master".
        accumulate: Batches of an optimizer step (`Trainer(accumulate_grad_batches=...)`).
        clip_norm: The largest norm of gradients; None for no clipping.
        steps: Optimizer steps of the training, which learning rate schedules ask for.
        data: The data module, which some modules ask for the size of a batch.
    """

    make: Callable[[], LightningModule]
    batch: Any
    mesh: MeshSpec
    config: StrategyConfig = field(default_factory=StrategyConfig)
    precision: str = "32-true"
    accumulate: int = 1
    clip_norm: float | None = None
    steps: int = 1000
    data: Any = None

    @property
    def dtypes(self) -> Mesh3DPrecision:
        """The precision, one for each module."""
        return Mesh3DPrecision(self.precision)

    def built(self) -> LightningModule:
        """Returns the whole module on the meta device, of which a Trainer knows.

        Raises:
            ModuleError: It optimizes manually, so that nobody knows when it steps.
        """
        precision = self.dtypes
        with InitRecorder(_SEED), precision.module_init_context():
            module = self.make()
            trainer = _trainer(self)
            module.trainer = trainer
            trainer.strategy.connect(module)
            module.configure_model()
        if not module.automatic_optimization:
            raise ModuleError(
                f"{class_name(module)} sets automatic_optimization=False, and a dry run takes the steps that "
                "Lightning takes by itself.",
                fix="automatic optimization",
            )
        precision.convert_module(module)
        module.train()
        return module

    def step_of(self, module: LightningModule, batch: Any) -> Callable[[], Any]:
        """Returns a call of the user's step.

        Args:
            module: The module.
            batch: The batch, or one micro-batch of it.
        """
        precision = self.dtypes

        def step() -> Any:
            with precision.train_step_context():
                return module.training_step(precision.convert_input(batch), *self.rest(module))

        return step

    def rest(self, module: LightningModule) -> tuple[Any, ...]:
        """Returns what Lightning gives a step besides its batch: the number of the batch, where it is asked for."""
        return (0,) if _takes_index(module) else ()


def _takes_index(module: LightningModule) -> bool:
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def _trainer(training: Training) -> Trainer:
    """A Trainer that never runs, for modules that ask theirs for steps or its data."""
    with _silent():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=-1,
            max_steps=training.steps,
            accumulate_grad_batches=training.accumulate,
        )
    if training.data is not None:
        told: Any = trainer
        told.datamodule = training.data
    return trainer


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps a Trainer from telling which devices it would use."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
