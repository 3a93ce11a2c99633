"""Pictures: figures of matplotlib, which is the extra ``plot``, and the files that they are saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed.", fix="pip install 'lightning-3d[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str | Path, key: str, *, dpi: int | None = None) -> None:
    """Writes a figure; the ending of the path says in which format.

    Args:
        figure: Of ``new_figure``.
        path: Where it is written.
        key: What a user calls the path, for errors.
        dpi: Pixels of an inch; None for those of the figure.

    Raises:
        ConfigError: The ending is of no format that matplotlib knows, or the file cannot be written.
    """
    ending, formats = Path(path).suffix.removeprefix("."), figure.canvas.get_supported_filetypes()
    if ending and ending.lower() not in formats:
        raise ConfigError(
            f"{key}={path}: no picture ends with .{ending}.",
            valid=sorted(formats),
            fix=f"{key}={Path(path).with_suffix('.png')}",
        )
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise ConfigError(
            f"{key}={path} cannot be written: {error.strerror or error}", valid="a file in a directory that exists"
        ) from error
