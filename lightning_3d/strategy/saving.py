"""The part of the strategy that saves and restores: Lightning's checkpoint hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint.layout import canonical, full_state_dict, module_state, whole
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.packed import packed
from lightning_3d.errors import CheckpointError
from lightning_3d.strategy.life import AppliedModule
from lightning_3d.strategy.processes import MeshStrategy


class SavingStrategy(MeshStrategy):
    """A strategy on a mesh whose checkpoints load on any other; what trains is added by `Mesh3DStrategy`."""

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
        applied.engine.rest()
        return full_state_dict(applied.module, keep=True, layouts=applied.layouts)

    def full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the whole of a parameter, of its gradient, or of a tensor of its optimizer state.

        A packed parameter that is cut over the tensor axis comes in its original order, which its own ``full_tensor()``
        does not know. Every rank must call it.

        Args:
            name: Name of the parameter in the module.
            tensor: As this rank holds it.
        """
        layout = self._module_on_mesh.layouts.get(canonical(name))
        found = whole(packed(tensor.detach(), layout), keep=True)
        assert found is not None, "it was asked for"
        return found.to(tensor.device)

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
    def lightning_module_state_dict(self) -> dict[str, Any]:
        applied = self._module_on_mesh
        applied.engine.rest()
        applied.share_buffers()
        return module_state(applied.module, applied.layouts)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        applied = self._module_on_mesh
        return optimizer_state(applied.module, plain, applied.layouts)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise CheckpointError(
                "storage_options belong to a CheckpointIO, and Mesh3DStrategy writes checkpoints itself.",
                fix="trainer.save_checkpoint(path) without storage_options",
            )
        self._on_mesh.checkpoints.save(checkpoint, self.broadcast(str(filepath)), self._module_on_mesh.layouts)

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
        self._on_mesh.checkpoints.load_module(checkpoint, applied.module, applied.layouts, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        applied = self._module_on_mesh
        self._on_mesh.checkpoints.load_optimizers(applied.module, self.optimizers, applied.layouts)

    @override
    def on_train_start(self) -> None:
        self._on_mesh.checkpoints.begin_training()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if not self._on_mesh.checkpoints.remove(str(filepath)):
            super().remove_checkpoint(filepath)
