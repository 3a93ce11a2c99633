"""What runs the steps of a module on the data axis: the contract of all engines, and the one for a single rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lightning_3d.errors import ModuleError, PartError

# What torch says when a parameter that is cut meets a plain tensor.
_MIXED = "mixed torch.Tensor and DTensor"


class DataEngine(ABC):
    """Runs steps of a module and keeps its gradients in step over the data axis."""

    @abstractmethod
    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Returns ``step(*args)``, a method of the module that calls it or its parts, with gradients to come."""

    @abstractmethod
    def visit(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, a use of the module that is no training step; nothing stays gathered behind it."""

    def backward(self) -> AbstractContextManager[None]:
        """Context of a backward, or of a schedule of several passes: what runs there uses the module as a step does."""
        return nullcontext()

    @abstractmethod
    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Called before the forward of a micro-batch, or before a schedule of several of them.

        Args:
            last: The optimizer step comes next, so gradients must meet.
            backwards: Backward passes until the next call, up to the last one that brings gradients.
        """

    def gradients_complete(self) -> None:
        """Called when the gradients of an optimizer step have met, before anything reads them."""
        return

    @abstractmethod
    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Called for a backward inside a step that is still running; returns the loss to go backward from."""

    @abstractmethod
    def after_inner_backward(self) -> None:
        """Called after a backward, or an optimizer step, inside a step that is still running."""

    @abstractmethod
    def rest(self) -> None:
        """Called when no step runs for a while, and before weights are read or written from outside."""


class PlainEngine(DataEngine):
    """One data rank: the module as it is."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls the step."""
        return step(*args)

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call."""
        return call()

    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Nothing to do."""

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Nothing to do."""
        return loss

    def after_inner_backward(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """Nothing to do."""


@contextmanager
def explained() -> Iterator[None]:
    """Tells a user whose step met a parameter while it was cut what happened.

    Raises:
        ModuleError: In place of torch's error.
    """
    try:
        yield
    except (PartError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _MIXED not in str(error):
            raise
        what = f": {error.fact}" if isinstance(error, PartError) else "."
        raise ModuleError(
            "the step uses a parameter while it is cut, outside the block that owns it, or from self.parameters() on "
            f"the tensor axis{what}",
            valid="attributes of modules (self.layer.weight), at zero_stage 1 and 2 after the block's forward, at 3 "
            "inside it, at 0 anywhere",
            fix="for a penalty on all weights the optimizer's weight_decay; else move the use, or zero_stage=0",
        ) from error
