"""A picture of predictions: memory by kind and time by part, one bar for each mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from lightning_3d.pictures import new_figure, save
from lightning_3d.planner.prediction import ESTIMATE, Prediction

_INCHES = 13
_LETTERS = 42
_NEEDED = "beside tensors"
# One colour for each part, in every picture.
_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "#1f77b4",
        "gathered parameters": "#9ecae1",
        "gradients": "#ff7f0e",
        "optimizer": "#2ca02c",
        "activations": "#d62728",
        "recomputed": "#ff9896",
        "logits": "#9467bd",
        "communication buffers": "#8c564b",
        "padding": "#7f7f7f",
        _NEEDED: "#dddddd",
        "compute": "#1f77b4",
        "recompute": "#9ecae1",
        "bubble": "#dddddd",
        "tensor": "#ff7f0e",
        "pipeline": "#9467bd",
        "data": "#d62728",
        "fixed": "#7f7f7f",
    }
)
_WHITE: Mapping[str, object] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
# A part below this share of the longest bar is not in the legend.
_SEEN = 0.002
# Below this share of a device's memory, bars would be slivers beside it.
_SMALL = 0.1


def save_picture(
    path: str | Path, predictions: Sequence[Prediction], *, given: Prediction | None = None, title: str = ""
) -> None:
    """Draws two rows of stacked bars: bytes of each mesh by kind, beside what a device has; seconds of a step by part.

    Args:
        path: Where the picture is written.
        predictions: The best meshes.
        given: The mesh of the configuration, drawn last.
        title: What stands above them.

    Raises:
        ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    shown = [*predictions, *([given] if given is not None else [])]
    names = [_name(f"{place})", one) for place, one in enumerate(predictions, 1)]
    names += [_name("as given:", given)] if given is not None else []
    figure = new_figure(_INCHES, 2.4 + 1.6 * len(shown))
    memory, time = figure.subplots(2)
    figure.suptitle(f"{title} - {ESTIMATE}".strip(" -"))
    _draw_memory(memory, names, shown)
    seconds = [one.time.by_name() for one in shown]
    unit, size = ("seconds", 1.0) if max(sum(row.values()) for row in seconds) >= 1 else ("milliseconds", 1e-3)
    rows = [{name: value / size for name, value in row.items()} for row in seconds]
    _stack(
        time, names, rows, [f"{sum(row.values()):.3g}, MFU {one.mfu:.0%}" for row, one in zip(rows, shown, strict=True)]
    )
    time.set_xlabel(f"{unit} of a step (± {max(one.time_band for one in shown):.0%})")
    save(figure, path, "picture", dpi=110)


def _draw_memory(axes: Any, names: Sequence[str], shown: Sequence[Prediction]) -> None:
    capacity = min(one.capacity for one in shown)
    most = max(one.allocated_bytes for one in shown)
    small = most < _SMALL * capacity
    unit, size = ("MB", 1e6) if small and most < 1e9 else ("GB", 1e9)
    rows = [{name: count / size for name, count in one.memory.by_name().items()} for one in shown]
    if small:
        texts = [f"{sum(row.values()):.3g}" for row in rows]
        label = f"{unit} of tensors on the fullest rank; a device has {capacity / 1e9:.0f} GB"
    else:
        texts = [f"{one.needed_bytes / size:.0f}" for one in shown]
        for row, one in zip(rows, shown, strict=True):
            row[_NEEDED] = (one.needed_bytes - one.allocated_bytes) / size
        label = f"{unit} needed on the fullest rank (± 10%)"
        axes.axvline(capacity / size, color="black", linestyle="--", linewidth=1, label="what a device has")
    _stack(axes, names, rows, texts)
    axes.set_xlabel(label)


def _name(place: str, one: Prediction) -> str:
    schedule = f", {one.pipeline_schedule}" if one.mesh.pipeline_parallel_size > 1 else ""
    kind = "" if one.activation_checkpointing == "none" else f", {one.activation_checkpointing} recomputation"
    text = f"{place} {one.mesh}, micro-batches of {one.batch.micro_size}{schedule}{kind}"
    return "\n".join(wrap(text, _LETTERS))


def _stack(axes: Any, names: Sequence[str], rows: Sequence[Mapping[str, float]], texts: Sequence[str]) -> None:
    left = [0.0] * len(names)
    longest = max(sum(row.values()) for row in rows)
    for part in rows[0]:
        sizes = [row[part] for row in rows]
        if max(sizes) > _SEEN * longest:
            axes.barh(range(len(names)), sizes, left=left, label=part, color=_COLOURS[part], height=0.6)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, (end, text) in enumerate(zip(left, texts, strict=True)):
        axes.text(end + 0.008 * longest, place, text, va="center", fontsize=8, bbox=_WHITE)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlim(0, max(1.12 * longest, axes.get_xlim()[1]))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
