"""Where configuration lies: the packaged one, and modules of a user's own that it names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_3d.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    """Returns the directory of Hydra's groups and main files."""
    return _shipped("conf")


def recipe_files() -> dict[str, Path]:
    """Returns the packaged recipes, whole-run files, by name."""
    return {path.stem: path for path in sorted(_shipped("recipes").glob("*.yaml"))}


@contextmanager
def importable_here() -> Iterator[None]:
    """Lets configurations name modules of the current directory, as ``python -m`` does."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _shipped(name: str) -> Path:
    homes = (_PACKAGE / name, _PACKAGE.parent / name)
    for home in homes:
        if home.is_dir():
            return home
    raise ConfigError(
        f"the directory {name}/ of lightning_3d is missing",
        valid=homes,
        fix="install lightning_3d again, from a wheel or with pip install -e",
    )
