"""The part of the strategy that saves and restores: Lightning's checkpoint hooks."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.errors import CheckpointError, ModuleError
from lightning_3d.faults.report import grouped
from lightning_3d.log import get_logger, told_if_slow
from lightning_3d.shards.hook_values import without_hook_values
from lightning_3d.strategy.faults.positions import during
from lightning_3d.strategy.processes import MeshStrategy

# What only a run needs is imported when it begins: naming the strategy should cost a program little.
if TYPE_CHECKING:
    from lightning_3d.checkpoint.members import Members
    from lightning_3d.checkpoint.report import LoadReport
    from lightning_3d.strategy.life import AppliedModule

_log = get_logger(__name__)


class SavingStrategy(MeshStrategy):
    """A strategy on a mesh whose checkpoints load on any other; what trains is added by `Mesh3DStrategy`."""

    # What was in the groups of each optimizer as the user made them.
    _members: Sequence[Sequence[Members]] | None = None
    # The signal that was answered last.
    _answered: BaseException | None = None

    @abstractmethod
    def _apply(self) -> AppliedModule:
        """Makes the connected module this rank's part of it, once in its life."""

    @property
    @abstractmethod
    def _module_on_mesh(self) -> AppliedModule:
        """The module after its plan was applied."""

    @override
    @without_hook_values()
    def full_state_dict(self) -> dict[str, Any]:
        """Returns the module's whole state on the CPU, on every rank. Every rank must call it."""
        from lightning_3d.checkpoint.gathering import full_state_dict

        self._stop_with_all()
        applied = self._module_on_mesh
        self._bring_buffers(applied)
        return full_state_dict(applied.module, keep=True, layouts=applied.layouts, presence=applied.presence)

    @without_hook_values()
    def full_tensor(self, name: str, tensor: Tensor | None) -> Tensor:
        """Returns the whole of a parameter, of its gradient, or of a tensor of its optimizer state.

        It comes in the model's own order, and to pipeline ranks that hold none of it too. Every rank must call it.

        Args:
            name: Name of the parameter in the module.
            tensor: As this rank holds it. None, or on the meta device, where another pipeline rank holds it.

        Raises:
            CheckpointError: No rank has values of it.
        """
        from lightning_3d.checkpoint.absent import is_absent
        from lightning_3d.checkpoint.gathering import gather_whole

        applied = self._module_on_mesh
        held = _held(name, tensor, applied)
        found: Tensor = gather_whole({name: held}, True, {}, applied.presence)[name]
        return found.to(self.root_device if tensor is None or is_absent(held) else tensor.device)

    @without_hook_values()
    def full_tensors(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Returns the whole of many tensors, as `full_tensor` does, in far less time than one by one.

        Every rank must call it, with the same names. Tensors of which no rank has values are left out.

        Args:
            tensors: By the names of their parameters, as this rank holds them.
        """
        from lightning_3d.checkpoint.absent import is_absent
        from lightning_3d.checkpoint.gathering import gather_named

        applied = self._module_on_mesh
        held = {name: _held(name, tensor, applied) for name, tensor in tensors.items()}
        whole = gather_named(held, applied.presence)
        here = {name: self.root_device if is_absent(value) else value.device for name, value in held.items()}
        return {name: tensor.to(here[name]) for name, tensor in whole.items()}

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Saves where a signal ends the run and nobody else saves; then lets the other ranks know."""
        from lightning_3d.strategy.faults.signals import path_at_signal

        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if isinstance(exception, SIGTERMException) and trainer is not None and self._answered is not exception:
            self._answered = exception
            path = path_at_signal(trainer)
            if path is not None:
                trainer.save_checkpoint(path)
                rank_zero_info("SIGTERM: saved %s, to go on from with ckpt_path", path)
        if self._run is not None and self._run.stop.all_stopped:
            # What is being written cannot be finished when the ranks have parted.
            self._finish_writing()
        super().on_exception(exception)

    def _stop_with_all(self) -> None:
        """After an exception, lets this rank save only with all others: one that is in a step still will never come.

        Raises:
            BaseException: The exception itself, where the Trainer then ends without a checkpoint.
            CheckpointError: The Trainer has ended.
        """
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED or self.world_size == 1:
            return
        exception = sys.exc_info()[1]
        if isinstance(exception, Exception):
            # At once: finding out takes time, in which the others could end. A signal ends all ranks anyway.
            self._tell(exception)
        reason = self._why_not_together()
        if reason and exception is not None:
            _log.error("No checkpoint is saved at this exception: %s.", reason)
            self.on_exception(exception)
            raise exception

    def _why_not_together(self) -> str:
        try:
            assert self._module_on_mesh
        except ModuleError:
            return "the module was not set up yet"
        if not dist.is_initialized():
            raise CheckpointError(
                "the Trainer has ended with an exception, and its ranks cannot save together any more.",
                fix="OnExceptionCheckpoint or ModelCheckpoint(save_on_exception=True), which save before",
            )
        for _, ranks in grouped(dict.fromkeys(self._on_mesh.stop.missing(), "")):
            return f"{ranks} did not stop with the others"
        return ""

    @staticmethod
    def _bring_buffers(applied: AppliedModule) -> None:
        """Makes the module's state the same on all ranks that hold it: buffers as the ranks have them that count."""
        from lightning_3d.initial.broadcast import BufferBroadcast

        applied.engine.rest()
        applied.share_buffers()
        if applied.presence is not None:
            BufferBroadcast(applied.module, applied.presence.group, applied.presence.source)()
        applied.copies.bring_buffers()

    @property
    def load_report(self) -> LoadReport | None:
        """What became of the checkpoint that was loaded last: restored, converted, edited, missing, not used."""
        return None if self._run is None else self._run.checkpoints.report

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """False: hooks then run in the order of one device, and ``weights_only`` arrives; see `load_checkpoint`."""
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Makes the optimizers, and notes what they step, here and elsewhere."""
        from lightning_3d.checkpoint.members import members_of

        super().setup_optimizers(trainer)
        applied = self._module_on_mesh
        if applied.presence is not None:
            self._members = [members_of(applied.module, optimizer) for optimizer in self.optimizers]

    @override
    @during("saving a checkpoint")
    @without_hook_values()
    def lightning_module_state_dict(self) -> dict[str, Any]:
        from lightning_3d.checkpoint.gathering import with_other_state
        from lightning_3d.checkpoint.layout import module_state

        # The first that Lightning asks for when it saves.
        self._stop_with_all()
        applied = self._module_on_mesh
        self._bring_buffers(applied)
        return with_other_state(module_state(applied.module, applied.layouts), applied.module, applied.presence)

    @override
    @without_hook_values()
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from lightning_3d.checkpoint.optimizers import optimizer_state

        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        applied = self._module_on_mesh
        known = () if self._members is None else self._members[self.optimizers.index(plain)]
        return optimizer_state(applied.module, plain, applied.layouts, presence=applied.presence, recorded=known)

    @override
    @during("saving a checkpoint")
    @without_hook_values()
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        from lightning_3d.strategy.data.places import without_marks

        writer = self._own_io
        if storage_options is not None and writer is None:
            raise CheckpointError(
                "storage_options belong to a CheckpointIO, and Mesh3DStrategy writes checkpoints itself.",
                fix="trainer.save_checkpoint(path) without storage_options, or Trainer(plugins=[your CheckpointIO])",
            )
        applied = self._module_on_mesh
        path = self.broadcast(str(filepath))
        if self._restarts is not None:
            self._restarts.saving(path, checkpoint)
        self._on_mesh.checkpoints.save(
            without_marks(checkpoint),
            path,
            applied.layouts,
            applied.presence,
            structure=applied.structure,
            places=self._on_mesh.places.now(applied.module.trainer),
            writer=writer,
            storage_options=storage_options,
        )

    @override
    @during("loading a checkpoint")
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        from lightning_3d.strategy.data.places import with_marks

        # Lightning loads before setup. The module is cut now, so that each rank reads its own part only.
        applied = self._apply()
        applied.engine.rest()
        with told_if_slow(f"reading {checkpoint_path}", rank_zero_info):
            checkpoint, places = self._on_mesh.checkpoints.open(
                str(checkpoint_path),
                applied.module,
                applied.layouts,
                weights_only=weights_only,
                reader=self._own_io,
            )
        with_marks(checkpoint.get("loops") or {}, places)
        self._on_mesh.places.resume(applied.module.trainer, places)
        return checkpoint

    @override
    @during("loading a checkpoint")
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        applied = self._module_on_mesh
        self._on_mesh.checkpoints.load_module(
            checkpoint,
            applied.module,
            applied.layouts,
            strict=strict,
            structure=applied.structure,
            presence=applied.presence,
        )

    @override
    @during("loading a checkpoint")
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        applied = self._module_on_mesh
        self._on_mesh.checkpoints.load_optimizers(
            applied.module, self.optimizers, applied.layouts, presence=applied.presence, recorded=self._members
        )

    @override
    def on_train_start(self) -> None:
        self._on_mesh.checkpoints.begin_training(self._module_on_mesh.module.trainer)
        self._on_mesh.places.begin_training()
        self._listen()
        # A search for a learning rate trains with a callback of its own.
        self._on_mesh.callbacks.open(self._module_on_mesh.module.trainer)

    def _listen(self) -> None:
        """Has signals reach all ranks; Lightning has set its own handlers by now."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        # They travel with what is logged.
        if self.world_size > 1 and not (trainer.barebones or trainer.predicting):
            self._on_mesh.signals.listen(trainer)

    @override
    def teardown(self) -> None:
        """Leaves the Trainer's callbacks as they were, finishes what is written, and lets the processes part."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._run is not None:
            self._run.callbacks.close()
        self._finish_writing()
        self._end_watch()
        self.cluster_environment.teardown()
        self._precision.teardown()
        self.accelerator.teardown()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._own_io is not None:
            super().remove_checkpoint(filepath)
        else:
            self._on_mesh.checkpoints.remove(str(filepath))

    @property
    def _own_io(self) -> CheckpointIO | None:
        """What the user has given to the Trainer to write checkpoints with; Lightning's own is not needed here."""
        own = self.checkpoint_io
        return None if type(own) is TorchCheckpointIO else own

    def _finish_writing(self) -> None:
        """Waits for what is written in the background, by a user's own CheckpointIO too."""
        if self._run is None:
            return
        module = self.lightning_module
        failed = module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED
        try:
            self._run.checkpoints.finish(self._own_io)
        except CheckpointError as error:
            if not failed:
                raise
            # The run ends with what has interrupted it.
            _log.error("%s", error)


def _held(name: str, tensor: Tensor | None, applied: AppliedModule) -> Any:
    """What this rank has of a parameter's tensor, as a checkpoint holds it."""
    from lightning_3d.checkpoint.absent import unknown
    from lightning_3d.checkpoint.layout import as_saved, canonical

    return unknown() if tensor is None else as_saved(tensor.detach(), applied.layouts.get(canonical(name)))
