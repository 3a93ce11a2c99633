"""Torch's state around a block that decides what its operations do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is switched on where a block is called.

    Attributes:
        grad: Gradients.
        inference: Inference mode.
        autocast: Device type to autocast's dtype, or None where it is off.
        saved_tensor_hooks: Hooks of autograd, of a checkpoint for example; of no matter to operations, but not to be
            changed inside.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    saved_tensor_hooks: Any

    @classmethod
    def now(cls, device_types: tuple[str, ...]) -> Self:
        """Returns what is switched on, with autocast of these types of device."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast(device_types), _saved_tensor_hooks()
        )

    def changed(self) -> str | None:
        """Returns how something other than gradients has been switched since, or None."""
        if torch.is_inference_mode_enabled() is not self.inference:
            return "it switches inference mode"
        if _autocast(tuple(kind for kind, _ in self.autocast)) != self.autocast:
            return "it switches autocast"
        if _saved_tensor_hooks() != self.saved_tensor_hooks:
            return "it has a checkpoint or other hooks of saved tensors inside"
        return None


def _autocast(device_types: tuple[str, ...]) -> tuple[tuple[str, torch.dtype | None], ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in device_types
    )


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
