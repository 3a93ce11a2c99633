"""A picture of what lives on each rank over an optimizer step; needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.counters import Category
from lightning_3d.dryrun.report import DryRunReport, RankReport
from lightning_3d.errors import ConfigError
from lightning_3d.units import format_bytes

_COLORS: Mapping[Category, str] = MappingProxyType(
    {
        Category.PARAMETER: "#4c78a8",
        Category.GATHERED_PARAMETER: "#9ecae9",
        Category.OPTIMIZER: "#b279a2",
        Category.GRADIENT: "#54a24b",
        Category.GATHERED_GRADIENT: "#a5d796",
        Category.BUFFER: "#bab0ac",
        Category.COMMUNICATION: "#eeca3b",
        Category.OTHER: "#f58518",
    }
)
_GIB = 2.0**30
_WIDTH, _HEIGHT = 12.0, 3.2


def draw(report: DryRunReport, path: Path) -> Path:
    """Draws live bytes by category over the operations of a step, one row for each rank.

    Args:
        report: With samples.
        path: Where the picture is written; its ending says in which format.

    Returns:
        The path.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib.", fix="pip install 'lightning-3d[plot]'") from error
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(report.ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, rank in enumerate(report.ranks):
        _row(figure.add_subplot(len(report.ranks), 1, index + 1), rank)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError(f"picture={path}: {error}", fix="picture=memory.png") from error
    return path


def _row(axes: Any, rank: RankReport) -> None:
    seen = [category for category in _COLORS if any(category in sample.categories for sample in rank.samples)]
    moments = [sample.operation for sample in rank.samples]
    heights = [[sample.categories.get(category, 0) / _GIB for sample in rank.samples] for category in seen]
    if moments:
        axes.stackplot(moments, heights, labels=[each.value for each in seen], colors=[_COLORS[each] for each in seen])
        axes.legend(loc="upper left", fontsize="x-small", ncols=4)
    peak = rank.peak.peak
    axes.axhline(peak.size / _GIB, color="black", linewidth=0.8, linestyle="--")
    axes.set_title(f"{rank.title}: peak {format_bytes(peak.size)} in {peak.phase}", fontsize="small", loc="left")
    axes.set_xlabel("operations of an optimizer step", fontsize="small")
    axes.set_ylabel("GiB", fontsize="small")
