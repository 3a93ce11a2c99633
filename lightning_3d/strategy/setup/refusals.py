"""What a pipeline cannot run of a module's training, told before the first step."""

from __future__ import annotations

from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.errors import ModuleError
from lightning_3d.graph.parameters import class_name
from lightning_3d.parallel.pipeline.planning import refuse_own_backward

_BACKWARDS = frozenset({"backward", "manual_backward"})


def refuse_own_training(module: LightningModule) -> None:
    """Refuses modules that train in a way of their own, which a schedule cannot.

    Args:
        module: The user's module.

    Raises:
        ModuleError: It optimizes manually, overrides ``backward``, or its ``optimizer_step`` runs one.
    """
    refuse_own_backward(module)
    step: Any = type(module).optimizer_step
    if step is not LightningModule.optimizer_step and _names(getattr(step, "__code__", None)) & _BACKWARDS:
        raise ModuleError(
            f"{class_name(module)} runs backward in optimizer_step, and with pipeline_parallel_size above 1 the "
            "schedule runs it.",
            fix="leave backward to the closure that optimizer_step is given, or pipeline_parallel_size=1",
        )


def refuse_compiled(module: LightningModule) -> None:
    """Refuses a module that was compiled as a whole: its steps talk to other ranks, and log.

    Args:
        module: What ``torch.compile(module)`` has made of the user's module.

    Raises:
        ModuleError: It was compiled.
    """
    if module._compiler_ctx is not None:
        raise ModuleError(
            f"{class_name(module)} was compiled as a whole, and Mesh3DStrategy works inside of its steps.",
            fix="give the Trainer the module as it is, and Mesh3DStrategy(compile=True), which compiles its blocks",
        )


def _names(code: CodeType | None) -> frozenset[str]:
    """The names that a function uses, those of functions inside it too."""
    if code is None:
        return frozenset()
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)
