"""Gradients of a backward that ran before Lightning's: put aside, and brought when Lightning asks for them."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.shards.absent import arrivals_of


class GradientsAside:
    """The gradients of a step that went forward and backward at once.

    Args:
        module: The user's module.
        precision: Fires the hooks around a backward.
        trained: Returns the parameters of all optimizers.
    """

    def __init__(
        self, module: LightningModule, precision: Mesh3DPrecision, trained: Callable[[], list[Tensor]]
    ) -> None:
        self._module = module
        self._precision = precision
        self._trained = trained
        self._absent = arrivals_of(module)
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] | None = None

    @property
    def waiting(self) -> bool:
        """Whether gradients lie aside."""
        return self._gradients is not None

    def forget(self) -> None:
        """Called when a step begins."""
        self._gradients = None

    def make_room(self) -> None:
        """Makes room for a new window: Lightning zeroes gradients only after the step, which has its own by then.

        The old ones are kept only for a module with its own idea of zeroing; torch's buckets would overwrite them.
        """
        keep = is_overridden("optimizer_zero_grad", self._module)
        if not keep:
            self._absent.clear()
        for parameter in self._trained():
            old = parameter.grad
            self._before.append((parameter, old.clone() if keep and old is not None else None))
            parameter.grad = None

    def put_aside(self) -> None:
        """Puts the gradients of the step aside, in their place what was there before it."""
        self._gradients = [(parameter, parameter.grad) for parameter in self._trained()]
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before.clear()

    def bring(self, loss: Tensor) -> Tensor:
        """The backward that Lightning calls when all micro-batches are through: gradients appear, hooks fire."""
        assert self._gradients is not None, "a step has put them aside"
        loss = self._precision.pre_backward(loss, self._module)
        for parameter, gradient in self._gradients:
            kept = parameter.grad
            if gradient is None or kept is gradient:
                continue
            parameter.grad = gradient if kept is None else gradient + kept
        self._gradients = None
        self._absent.arrive(self._trained())
        return self._precision.post_backward(loss, self._module)
