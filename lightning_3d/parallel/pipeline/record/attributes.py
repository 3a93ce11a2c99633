"""Reading attributes of layers that a rank does not run: the error says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_3d.errors import ModuleError, user_line

_FIX = "return it from the module, and hand it on by arguments and results"


@contextmanager
def attributes_explained(module: nn.Module, watched: Iterable[str]) -> Iterator[None]:
    """Context of a step that may look for what a block has left as an attribute.

    Args:
        module: The user's module.
        watched: Names of blocks and other modules that some stages alone run.

    Raises:
        ModuleError: It was not found.
    """
    try:
        yield
    except AttributeError as error:
        name = _place(module, watched, error.obj)
        if name is None:
            raise
        raise ModuleError(
            f"{name} has no attribute {error.name!r} ({user_line(error)}): on other pipeline stages its forward is not "
            "run, and what it leaves as an attribute is missing there.",
            fix=_FIX,
        ) from error


def failed_before(stage: int, error: Exception) -> ModuleError:
    """Returns the error of a step that failed on a stage before its first block.

    Args:
        stage: Its number.
        error: What the user's code raised.
    """
    return ModuleError(
        f"{type(error).__name__} on pipeline stage {stage}, before its first block, at {user_line(error)}: {error}. "
        "Modules of earlier stages are not run there, and what they leave as attributes is missing.",
        fix=_FIX,
    )


def _place(module: nn.Module, watched: Iterable[str], owner: object) -> str | None:
    inner: str
    for name in watched:
        for inner, child in module.get_submodule(name).named_modules(prefix=name):
            if child is owner:
                return inner
    return None
