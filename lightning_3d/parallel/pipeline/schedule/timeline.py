"""Who computes what and when in a step, measured or simulated: idle time, micro-batches in flight, text and picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.parallel.pipeline.schedule.actions import Action, Kind
from lightning_3d.pictures import new_figure, save

_COLORS: Mapping[Kind, str] = MappingProxyType({"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"})
_MEANINGS: Mapping[Kind, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
)
_ROW_HEIGHT, _INCHES = 0.8, 12.0
# Of small text, side by side in the whole width.
_CHARACTERS = 150


@dataclass(frozen=True, slots=True)
class Event:
    """One computation of a rank.

    Attributes:
        rank: The pipeline rank.
        action: What it computed.
        start: When it began, in seconds or in steps of a simulation.
        end: When it ended.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computations of one step on all pipeline ranks.

    Attributes:
        ranks: Degree of the pipeline axis.
        events: The computations, those of each rank in order.
    """

    ranks: int
    events: tuple[Event, ...]

    @property
    def start(self) -> float:
        """When the first computation began."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def duration(self) -> float:
        """Time from the first to the last computation of any rank."""
        return max((event.end for event in self.events), default=0.0) - self.start

    @property
    def bubble(self) -> float:
        """Share of the duration in which ranks wait, over all ranks."""
        busy = sum(event.end - event.start for event in self.events)
        return 1 - busy / (self.ranks * self.duration) if self.duration else 0.0

    def of_rank(self, rank: int) -> tuple[Event, ...]:
        """Returns the computations of one rank, in order."""
        return tuple(event for event in self.events if event.rank == rank)

    def in_flight(self, rank: int, sizes: Sequence[float] | None = None) -> float:
        """Returns how much waits on a rank for its backward at the worst moment.

        Args:
            rank: The pipeline rank.
            sizes: What one micro-batch holds on each stage; None counts each as 1.
        """
        events = self.of_rank(rank)
        # What the weights need is held until theirs is done, where the backward comes in halves.
        halved = {(event.action.stage, event.action.microbatch) for event in events if event.action.kind == "W"}
        held = worst = 0.0
        for event in events:
            stage, kind = event.action.stage, event.action.kind
            size = 1.0 if sizes is None else sizes[stage]
            if kind == "F":
                held += size
                worst = max(worst, held)
            elif kind != "I" or (stage, event.action.microbatch) not in halved:
                held -= size
        return worst

    def text(self, width: int = 120) -> str:
        """Returns one row for each rank, in which time runs to the right.

        Args:
            width: Characters of the duration.
        """
        begin, duration, label = self.start, self.duration, self._labels()
        scale = width / duration if duration else 0.0
        lines = [f"bubble {self.bubble:.1%}, micro-batches in flight {self._flights()}"]
        for rank in range(self.ranks):
            cells = ["."] * round(duration * scale)
            for event in self.of_rank(rank):
                first, end = (round((moment - begin) * scale) for moment in (event.start, event.end))
                cells[first:end] = f"{label(event.action):-<{max(end - first - 1, 0)}} "[: end - first]
            lines.append(f"rank {rank:<2} {''.join(cells).rstrip()}")
        return "\n".join(lines)

    def table(self) -> str:
        """Returns the text in which even the shortest computation shows what it is."""
        lengths = [event.end - event.start for event in self.events if event.end > event.start]
        label = self._labels()
        columns = max((len(label(event.action)) for event in self.events), default=0) + 1
        return self.text(round(self.duration / min(lengths) * columns) if lengths else 0)

    def save_png(self, path: str | Path, *, title: str = "") -> None:
        """Draws one bar for each rank, in which time runs to the right.

        Args:
            path: Where the picture is written.
            title: What stands above it.

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
        """
        save_png(path, {title: self})

    def draw(self, axes: Any, title: str = "", unit: str = "") -> None:
        """Draws the bars into a picture of somebody else's.

        Args:
            axes: Axes of matplotlib.
            title: What stands above them.
            unit: In what time is counted.
        """
        begin, duration, label = self.start, self.duration, self._labels()
        for event in self.events:
            start, length = event.start - begin, event.end - event.start
            color = _COLORS[event.action.kind]
            axes.barh(event.rank, length, _ROW_HEIGHT, left=start, color=color, edgecolor="white", linewidth=0.5)
            text = label(event.action)
            if length > duration * len(text) / _CHARACTERS:
                middle = start + length / 2
                axes.text(middle, event.rank, text, ha="center", va="center", size=7)
        axes.set_yticks(range(self.ranks), [f"rank {rank}" for rank in range(self.ranks)])
        axes.invert_yaxis()
        axes.set_xlim(0, duration or 1.0)
        axes.set_xlabel(f"time, {unit}" if unit else "time")
        axes.set_title(f"{title}{' - ' if title else ''}bubble {self.bubble:.1%}")
        shown = [kind for kind in _COLORS if any(event.action.kind == kind for event in self.events)]
        bars = [axes.barh(0, 0, color=_COLORS[kind]) for kind in shown]
        axes.legend(bars, [_MEANINGS[kind] for kind in shown], loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)

    def __str__(self) -> str:
        return self.text()

    def _flights(self) -> str:
        return " ".join(f"{self.in_flight(rank):g}" for rank in range(self.ranks))

    def _labels(self) -> Callable[[Action], str]:
        """Returns what names computations: with their stage if ranks have several."""
        several = any(event.action.stage >= self.ranks for event in self.events)
        return str if several else lambda action: f"{action.kind}{action.microbatch}"


def save_png(path: str | Path, timelines: Mapping[str, Timeline], units: Mapping[str, str] | None = None) -> None:
    """Draws some timelines below each other.

    Args:
        path: Where the picture is written.
        timelines: What stands above each, and the timeline.
        units: In what their times are counted, by the same names.

    Raises:
        ConfigError: matplotlib is not installed or does not know the format, or the file cannot be written.
    """
    figure = new_figure(_INCHES, sum(2.0 + timeline.ranks * 0.45 for timeline in timelines.values()))
    rows = figure.subplots(len(timelines), squeeze=False)
    for (axes,), (title, timeline) in zip(rows, timelines.items(), strict=True):
        timeline.draw(axes, title, (units or {}).get(title, ""))
    save(figure, path, "path")
