"""A picture of predictions: memory by kind and time by part, one bar for each mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planner.prediction import ESTIMATE, Prediction

_INCHES = 13


def save_picture(path: str | Path, predictions: Sequence[Prediction], *, title: str = "") -> None:
    """Draws two rows of stacked bars: GB of each mesh by kind, with what a device has; seconds of a step by part.

    Args:
        path: Where the picture is written.
        predictions: The meshes.
        title: What stands above them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture of a plan needs matplotlib, which is not installed.", fix="install lightning-3d[plot]"
        ) from error
    figure = Figure(figsize=(_INCHES, 2.6 + 1.2 * len(predictions)), layout="constrained")
    memory, time = figure.subplots(2)
    figure.suptitle(f"{title} - {ESTIMATE}".strip(" -"))
    names = [str(one.mesh).replace(", ", "\n", 1) for one in predictions]
    kinds = [{name: size / 1e9 for name, size in one.memory.by_name().items()} for one in predictions]
    _stack(memory, names, kinds, "GB allocated on the fullest rank")
    for capacity in {one.capacity for one in predictions}:
        memory.axvline(capacity / 1e9, color="black", linestyle="--", linewidth=1)
    _stack(time, names, [one.time.by_name() for one in predictions], "seconds of a step")
    figure.savefig(path)


def _stack(axes: Any, names: Sequence[str], rows: Sequence[Mapping[str, float]], label: str) -> None:
    left = [0.0] * len(names)
    for part in rows[0] if rows else ():
        sizes = [row[part] for row in rows]
        if max(sizes) > 0:
            axes.barh(range(len(names)), sizes, left=left, label=part, edgecolor="white", linewidth=0.5)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
