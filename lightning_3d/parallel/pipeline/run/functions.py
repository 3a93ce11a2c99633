"""Watching the functions of torch that a step calls at the level of its containers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook
from typing_extensions import Self

from lightning_3d.parallel.pipeline.record.hidden import Function

Watch = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
_DEVICE: Any = Tensor.device
_REENTRANT = CheckpointFunction.forward.__code__
_CHECKPOINT = f"{_checkpoint_hook.__name__}."


class ContainerFunctions(TorchFunctionMode):
    """Hands every function of torch over, but for those inside of modules.

    Args:
        watch: Makes the call.
        compiled: Whether the user has compiled anything. It runs as it is where functions are watched, since Dynamo
            would not show them.
    """

    def __init__(self, watch: Watch, *, compiled: bool = False) -> None:
        super().__init__()
        self._watch = watch
        self._aside = 0
        self._compiled = compiled
        self._eager: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> Self:
        if self._compiled:
            self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._eager.__exit__(kind, error, trace)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._aside:
            return func(*args, **(kwargs or {}))
        return self._watch(func, args, kwargs or {})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which nothing is watched, and functions cost nothing more."""
        # Under a mode of the user's own it cannot be taken away.
        on_top = _get_current_function_mode() is self
        if on_top:
            self.__exit__(None, None, None)
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1
            if on_top:
                self.__enter__()


def reentrant_checkpoint_runs() -> bool:
    """Returns whether a checkpoint runs here that hides from autograd what it computes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False


def checkpointed_region() -> object | None:
    """Returns what stands for the innermost checkpoint that runs here; None outside of all."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    packs = None if hooks is None else hooks[0]
    return packs if getattr(packs, "__qualname__", "").startswith(_CHECKPOINT) else None


def is_absent(value: object) -> bool:
    """Returns whether a value is a parameter that lives on other pipeline ranks only."""
    # Parameter's own isinstance is slow, and plain tensors are asked for most.
    return type(value) is not Tensor and isinstance(value, Tensor) and isinstance(value, nn.Parameter) and value.is_meta


def asks_for_device(function: Function, args: tuple[Any, ...]) -> bool:
    """Returns whether a function reads the device of a parameter that has none here."""
    return function == _DEVICE.__get__ and is_absent(args[0])


class ParameterNames:
    """The first names of parameters, whatever stands for them while a step runs.

    Args:
        module: The whole module, its parameters still tied as they were.
        leaves: On the tensor axis other tensors are read in their place while a step runs.
    """

    def __init__(self, module: nn.Module, *, leaves: bool = False) -> None:
        self._leaves = leaves
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self._places = [
            (child, key, first[id(parameter)])
            for child in module.modules()
            for key, parameter in child._parameters.items()
            if parameter is not None
        ]
        self._names: Mapping[int, tuple[Tensor, str]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Looks again at what stands under the names."""
        # What is found is kept, so that its identity lasts.
        shown = [(getattr(child, key, None), name) for child, key, name in self._places]
        self._names = {id(value): (value, name) for value, name in shown if value is not None}

    def below(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of the parameters in a module."""
        inside = set(module.modules())
        return frozenset(name for child, _, name in self._places if child in inside)

    def __call__(self, value: object) -> str | None:
        """Returns the first name of a parameter, and None for anything else."""
        known = self._names.get(id(value))
        if known is None and self._may_be_new(value):
            self.refresh()
            known = self._names.get(id(value))
        return None if known is None else known[1]

    def _may_be_new(self, value: object) -> bool:
        # Parameters are gathered, and read as parts, while a step runs.
        if not isinstance(value, Tensor):
            return False
        return isinstance(value, nn.Parameter) or (self._leaves and value.is_leaf and value.requires_grad)
