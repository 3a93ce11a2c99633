"""How step times grow with the model, the ranks and the micro-batches: `python -m tests.benchmarks.scaling`.

Each point is a pair of loops that take turns step by step: ours and a hand-written one, FSDP2 on the data axis and a
hand-split model around torch's 1F1B on the pipeline axis. Ranks share the cores of one machine: with more ranks than
cores a step takes longer by nature, and the ratio is what counts. Prints Markdown tables and draws
`docs/pictures/scaling.png` where matplotlib is installed; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks import data_axis, pipeline_axis
from tests.benchmarks.loops import Size
from tests.spmd.pool import run_spmd

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "scaling.png"
WIDTHS, RANKS, MICROBATCHES = (96, 192, 384, 768), (1, 2, 4, 8), (2, 4, 8, 16)
Times = list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Point:
    """One pair of loops at one size.

    Attributes:
        x: The size.
        rows: Wall seconds (ours, theirs) and CPU seconds (ours, theirs) of each pair of steps.
    """

    x: int
    rows: Times

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Median wall times of a step, ours and by hand."""
        return tuple(statistics.median(row[side] for row in self.rows) * 1e3 for side in (0, 1))  # type: ignore[return-value]

    @property
    def ratio(self) -> list[float]:
        """Quartiles of the ratio of wall times."""
        return statistics.quantiles([row[0] / row[1] for row in self.rows], n=4)

    def line(self) -> str:
        """Returns a row of a Markdown table."""
        ours, theirs = self.milliseconds
        low, middle, high = self.ratio
        return f"| {self.x} | {ours:.1f} | {theirs:.1f} | {low:.3f} / {middle:.3f} / {high:.3f} |"


def model_sizes(steps: int) -> Iterator[Point]:
    """Widths of the model, two data ranks with ZeRO 3."""
    for width in WIDTHS:
        size = Size(width=width, heads=width // 32, samples=2)
        yield Point(width, run_spmd(data_axis.measure, 2, "fsdp2_by_hand", steps, size, timeout=900)[0])


def ranks(steps: int) -> Iterator[Point]:
    """Data ranks with ZeRO 3, the batch of each the same."""
    for world in RANKS:
        size = Size(samples=2)
        yield Point(world, run_spmd(data_axis.measure, world, "fsdp2_by_hand", steps, size, timeout=900)[0])


def microbatches(steps: int) -> Iterator[Point]:
    """Micro-batches of one sample on two stages, 1F1B."""
    small = next(size for size in pipeline_axis.SIZES if size.name == "small")
    for count in MICROBATCHES:
        size = replace(small, microbatches=count, samples=count)
        yield Point(count, run_spmd(pipeline_axis.measure, 2, size, "1f1b", steps, timeout=900)[0])


SWEEPS = {
    "width of the model (ZeRO 3 on 2 ranks, hand-written FSDP2)": model_sizes,
    "data ranks (ZeRO 3, hand-written FSDP2)": ranks,
    "micro-batches (2 stages, hand-split torch.distributed.pipelining)": microbatches,
}


def draw(found: Mapping[str, list[Point]], path: Path) -> None:
    """Draws step times of both sides, one panel for each sweep, the ratio beneath it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(found), 5.2), layout="constrained")
    panels = figure.subplots(2, len(found), height_ratios=(2, 1), squeeze=False)
    for column, (title, points) in enumerate(found.items()):
        top, bottom = panels[:, column]
        x = [point.x for point in points]
        for side, (name, color) in enumerate((("lightning_3d", "#4c78a8"), ("by hand", "#f58518"))):
            top.plot(x, [point.milliseconds[side] for point in points], marker="o", label=name, color=color)
        low, middle, high = zip(*(point.ratio for point in points), strict=True)
        bottom.fill_between(x, low, high, alpha=0.25, color="#4c78a8")
        bottom.plot(x, middle, marker="o", color="#4c78a8")
        bottom.axhline(1, color="black", linewidth=0.8, linestyle="--")
        bottom.set_ylim(min(0.8, *low), max(1.2, *high))
        what, _, how = title.partition(" (")
        top.set_title(f"{what}\n{how.rstrip(')')}", fontsize="small")
        top.set_yscale("log")
        for axes in (top, bottom):
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, map(str, x))
        bottom.set_xlabel(what)
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("ratio, quartiles")
    panels[0, 0].legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Prints the tables and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=61, help="timed steps of each loop at each point")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    found: dict[str, list[Point]] = {}
    for title, sweep in SWEEPS.items():
        what = title.partition(" (")[0]
        print(
            f"\n**{title}**\n\n| {what} | ours, ms | by hand, ms | wall ratio (quartiles) |\n|---|---|---|---|",
            flush=True,
        )
        found[title] = []
        for point in sweep(options.steps):
            found[title].append(point)
            print(point.line(), flush=True)
    try:
        draw(found, options.picture)
    except ImportError:
        print("\nmatplotlib is not installed, so nothing was drawn.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
