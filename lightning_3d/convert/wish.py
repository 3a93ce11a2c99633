"""What a conversion is to write, before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import CheckpointError

MESH, TORCH, SAFETENSORS = "mesh", "torch", "safetensors"
FORMS = (TORCH, SAFETENSORS, MESH)
SIZE = "5GB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be written.

    Attributes:
        form: One of ``FORMS``.
        prefix: For safetensors to take off the names, from safetensors to put before them; None guesses the former.
        size: The largest file of safetensors.
        weights_only: Leave out optimizers.
    """

    form: str
    prefix: str | None = None
    size: str = SIZE
    weights_only: bool = False


def place_for(out: Path) -> Path:
    """Returns the absolute path of what will be written.

    Args:
        out: Where to.

    Raises:
        CheckpointError: Something is there.
    """
    out = out.expanduser().absolute()
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already", fix="choose another name, or remove it")
    return out
