"""The part of the strategy that saves and restores: Lightning's checkpoint hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint.absent import ABSENT, is_absent
from lightning_3d.checkpoint.gathering import full_state_dict, gather_whole, with_other_state
from lightning_3d.checkpoint.layout import as_saved, canonical, module_state
from lightning_3d.checkpoint.members import Members, members_of
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.errors import CheckpointError
from lightning_3d.initial.broadcast import BufferBroadcast
from lightning_3d.strategy.life import AppliedModule
from lightning_3d.strategy.processes import MeshStrategy


class SavingStrategy(MeshStrategy):
    """A strategy on a mesh whose checkpoints load on any other; what trains is added by `Mesh3DStrategy`."""

    # What was in the groups of each optimizer as the user made them.
    _members: Sequence[Sequence[Members]] | None = None

    @abstractmethod
    def _apply(self) -> AppliedModule:
        """Makes the connected module this rank's part of it, once in its life."""

    @property
    @abstractmethod
    def _module_on_mesh(self) -> AppliedModule:
        """The module after its plan was applied."""

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the module's whole state on the CPU, on every rank. Every rank must call it."""
        applied = self._module_on_mesh
        self._bring_buffers(applied)
        return full_state_dict(applied.module, keep=True, layouts=applied.layouts, presence=applied.presence)

    def full_tensor(self, name: str, tensor: Tensor | None) -> Tensor:
        """Returns the whole of a parameter, of its gradient, or of a tensor of its optimizer state.

        It comes in the model's own order, and to pipeline ranks that hold none of it too. Every rank must call it.

        Args:
            name: Name of the parameter in the module.
            tensor: As this rank holds it. None, or on the meta device, where another pipeline rank holds it.

        Raises:
            CheckpointError: No rank has values of it.
        """
        applied = self._module_on_mesh
        held = ABSENT if tensor is None else as_saved(tensor.detach(), applied.layouts.get(canonical(name)))
        found: Tensor = gather_whole({name: held}, True, {}, applied.presence)[name]
        return found.to(self.root_device if tensor is None or is_absent(held) else tensor.device)

    @staticmethod
    def _bring_buffers(applied: AppliedModule) -> None:
        """Makes the module's state the same on all ranks that hold it: buffers as the ranks have them that count."""
        applied.engine.rest()
        applied.share_buffers()
        if applied.presence is not None:
            BufferBroadcast(applied.module, applied.presence.group, applied.presence.source)()

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
        super().setup_optimizers(trainer)
        applied = self._module_on_mesh
        if applied.presence is not None:
            self._members = [members_of(applied.module, optimizer) for optimizer in self.optimizers]

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        applied = self._module_on_mesh
        self._bring_buffers(applied)
        return with_other_state(module_state(applied.module, applied.layouts), applied.module, applied.presence)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        applied = self._module_on_mesh
        known = () if self._members is None else self._members[self.optimizers.index(plain)]
        return optimizer_state(applied.module, plain, applied.layouts, presence=applied.presence, recorded=known)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise CheckpointError(
                "storage_options belong to a CheckpointIO, and Mesh3DStrategy writes checkpoints itself.",
                fix="trainer.save_checkpoint(path) without storage_options",
            )
        applied = self._module_on_mesh
        path = self.broadcast(str(filepath))
        self._on_mesh.checkpoints.save(checkpoint, path, applied.layouts, applied.presence)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning loads before setup. The module is cut now, so that each rank reads its own part only.
        applied = self._apply()
        applied.engine.rest()
        return self._on_mesh.checkpoints.open(
            str(checkpoint_path), applied.module, applied.layouts, weights_only=weights_only
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        applied = self._module_on_mesh
        self._on_mesh.checkpoints.load_module(
            checkpoint, applied.module, applied.layouts, strict=strict, presence=applied.presence
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        applied = self._module_on_mesh
        self._on_mesh.checkpoints.load_optimizers(
            applied.module, self.optimizers, applied.layouts, presence=applied.presence, recorded=self._members
        )

    @override
    def on_train_start(self) -> None:
        self._on_mesh.checkpoints.begin_training()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if not self._on_mesh.checkpoints.remove(str(filepath)):
            super().remove_checkpoint(filepath)
