"""A picture of what lives on each rank over an optimizer step; needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.counters import Category
from lightning_3d.dryrun.report import DryRunReport, RankReport
from lightning_3d.pictures import new_figure, save
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
_UNITS: Mapping[str, float] = MappingProxyType({"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0})
_WIDTH, _HEIGHT, _MARGIN = 12.0, 3.2, 1.0
_BACKWARD = "a backward runs"
# Room above the peak for its label.
_ROOM = 1.12


def draw(report: DryRunReport, path: Path) -> Path:
    """Draws live bytes by category over the operations of a step, one panel for each rank.

    Args:
        report: With samples.
        path: Where the picture is written; its ending says in which format.

    Returns:
        The path.

    Raises:
        ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    rows = len(report.ranks)
    figure = new_figure(_WIDTH, _HEIGHT * rows + _MARGIN)
    figure.suptitle(f"Live bytes in an optimizer step: {report.plan.mesh}, {report.precision}", fontsize="medium")
    unit = next(name for name, size in _UNITS.items() if report.worst.peak.peak.size >= size)
    panels = figure.subplots(rows, 1, squeeze=False)[:, 0]
    marks: dict[str, Any] = {}
    for axes, rank in zip(panels, report.ranks, strict=True):
        marks |= _panel(axes, rank, unit)
    panels[-1].set_xlabel("operations since the step began", fontsize="small")
    order = [name for name in (*(each.value for each in _COLORS), _BACKWARD) if name in marks]
    figure.legend([marks[name] for name in order], order, loc="outside lower center", ncols=5, fontsize="small")
    save(figure, path, "picture", dpi=120)
    return path


def _panel(axes: Any, rank: RankReport, unit: str) -> dict[str, Any]:
    """Draws one rank; returns what the legend shows, by name."""
    size = _UNITS[unit]
    marks: dict[str, Any] = {}
    seen = [category for category in _COLORS if any(category in sample.categories for sample in rank.samples)]
    moments = [sample.operation for sample in rank.samples]
    if moments:
        heights = [[sample.categories.get(category, 0) / size for sample in rank.samples] for category in seen]
        bands = axes.stackplot(moments, heights, colors=[_COLORS[each] for each in seen], linewidth=0)
        marks |= {category.value: band for category, band in zip(seen, bands, strict=True)}
        for begin, end in _backwards(rank):
            marks[_BACKWARD] = axes.axvspan(begin, end, color="black", alpha=0.07, linewidth=0, zorder=0)
        axes.set_xlim(moments[0], moments[-1])
    peak = rank.peak.peak
    axes.axhline(peak.size / size, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {format_bytes(peak.size)} in {peak.phase}",
        (1, peak.size / size),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize="small",
    )
    axes.set_ylim(0, _ROOM * peak.size / size)
    axes.set_title(rank.title, fontsize="small", loc="left")
    axes.set_ylabel(unit, fontsize="small")
    axes.tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    return marks


def _backwards(rank: RankReport) -> list[tuple[int, int]]:
    """From which operation to which a backward runs, as far as the samples tell."""
    spans: list[tuple[int, int]] = []
    running = ""
    for sample in rank.samples:
        if sample.phase.startswith("backward"):
            begin = spans.pop()[0] if sample.phase == running else sample.operation
            spans.append((begin, sample.operation))
        running = sample.phase
    return [(begin, end) for begin, end in spans if end > begin]
