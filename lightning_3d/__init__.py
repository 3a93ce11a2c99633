"""lightning_3d: train an unmodified LightningModule on a data x pipeline x tensor mesh.

The public names are those of ``__all__``; everything else may change without notice.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lightning_3d.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    Lightning3DError,
    MeshError,
    ModuleError,
    PlanError,
)

if TYPE_CHECKING:
    from lightning_3d.precision import Mesh3DPrecision
    from lightning_3d.strategy import Mesh3DStrategy
    from lightning_3d.verify import verify

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "Lightning3DError",
    "Mesh3DPrecision",
    "Mesh3DStrategy",
    "MeshError",
    "ModuleError",
    "PlanError",
    "__version__",
    "verify",
]

# Names that need torch: imported at first use, so that a command line answers before torch is loaded.
_LAZY: Final = MappingProxyType(
    {"Mesh3DPrecision": "lightning_3d.precision", "Mesh3DStrategy": "lightning_3d.strategy"}
)


def _is_own_command_line() -> bool:
    program = sys.argv[0] if sys.argv else ""
    # "-m" stands there while the module that will run is looked for: ours, or one of another package that imports us.
    of_module = program == "-m" and "lightning_3d" in sys.orig_argv
    return of_module or os.path.basename(program) == "lightning-3d"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "verify":
            # A package that is called as the function of that name in it.
            return importlib.import_module("lightning_3d.verify")
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not _is_own_command_line():
    # Registers "mesh_3d" and its kin, so that Trainer(strategy="mesh_3d") finds them.
    importlib.import_module("lightning_3d.strategy")
