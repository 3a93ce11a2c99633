"""The errors a user may meet: one family, one shape: the fact, the valid values, the fix."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_stack, walk_tb

_OWN = f"{Path(__file__).parent}{os.sep}"
# Models that could be anybody's.
_REFERENCE = f"{_OWN}reference{os.sep}"


class Lightning3DError(Exception):
    """Base of every error that lightning_3d raises on purpose.

    Args:
        fact: What is wrong, with the user's own names and the numbers.
        valid: The values that would be accepted, where they can be listed.
        fix: What to change, as the user would type it.
    """

    def __init__(self, fact: str, *, valid: object = None, fix: str | None = None) -> None:
        self.fact = fact
        self.valid = valid
        self.fix = fix
        super().__init__(fact)

    def __str__(self) -> str:
        lines = [self.fact]
        if self.valid is not None:
            lines.append(f"  valid: {_listed(self.valid)}")
        if self.fix is not None:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own pickling, and errors travel between processes.
        return _rebuild, (type(self), self.fact, self.valid, self.fix)


class ConfigError(Lightning3DError, ValueError):
    """An option has an unknown name or an impossible value."""


class MeshError(Lightning3DError, ValueError):
    """The degrees of the mesh do not fit each other, the world or the machine."""


class BatchError(Lightning3DError, ValueError):
    """A batch cannot be cut, joined or served on this mesh."""


class ModuleError(Lightning3DError, ValueError):
    """The user's LightningModule does something that this mesh cannot run."""


class PartError(ModuleError):
    """Something needs the whole of a parameter where each rank has a part."""


class PlanError(Lightning3DError, ValueError):
    """A plan names something that the model does not have, or cannot be exact."""


class NonFiniteError(Lightning3DError, RuntimeError):
    """A loss or a gradient is infinite or not a number."""


class RunError(Lightning3DError, RuntimeError):
    """A run of the user's module in processes of its own failed, or took too long."""


class CheckpointError(Lightning3DError, RuntimeError):
    """A checkpoint cannot be written, found, read or matched to the model."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name closest to ``name``, for "did you mean" texts, or None if none is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def few_and_more(names: Iterable[str], most: int = 8) -> str:
    """Returns the first names as text, and how many more there are.

    Args:
        names: The names.
        most: How many of them are told.
    """
    listed = [*names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def user_line(error: BaseException | None = None) -> str:
    """Returns file and line of the user's code that runs here: not torch's, not this package's, not generated code.

    Args:
        error: Where it was raised instead.
    """
    torch = find_spec("torch")
    assert torch is not None, "the package needs it"
    others = (_OWN, f"{Path(torch.origin or '').parent}{os.sep}", "<")
    raised = [] if error is None else [*walk_tb(error.__traceback__)]
    for frame, line in [*reversed(raised), *walk_stack(sys._getframe(1))]:
        file = frame.f_code.co_filename
        if file.startswith(_REFERENCE) or not file.startswith(others):
            return f"{file}:{line}"
    return "an unknown place"


def _listed(valid: object) -> str:
    if isinstance(valid, str):
        return valid
    if isinstance(valid, Iterable):
        return ", ".join(str(value) for value in valid)
    return str(valid)


def _rebuild(kind: type[Lightning3DError], fact: str, valid: object, fix: str | None) -> Lightning3DError:
    return kind(fact, valid=valid, fix=fix)
