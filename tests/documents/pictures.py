"""The pictures of the documents, drawn from the code that they explain: `python -m tests.documents.pictures`.

Three are drawn from plans and prices, which takes seconds; with `--measured` the timeline of the demo is taken from a
real training, which takes a minute.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.dryrun import Training
from lightning_3d.dryrun.planned import planned
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.pipeline.schedule.simulate import StageTimes, simulate
from lightning_3d.parallel.tensor.plan import ParameterStyle
from lightning_3d.planner import BatchShape, DecoderShape, MeshShape, predict
from lightning_3d.reference.gpt import GPT

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
RANK_COLORS = ("#4c78a8", "#f58518")
WHOLE = "#bab0ac"
# So that drawing again gives the same file.
_SAVED = MappingProxyType({"metadata": {"Date": None, "Creator": None}})


def mesh(path: Path) -> None:
    """2 x 2 x 2 ranks: which of them the axes connect."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    spec = MeshSpec(data=2, pipeline=2, tensor=2)
    for data in range(spec.data):
        for stage in range(spec.pipeline):
            for part in range(spec.tensor):
                rank = (data * spec.pipeline + stage) * spec.tensor + part
                x, y = stage * 3.2 + part * 1.25, -data * 1.9
                _box(axes, x, y, 1.05, 0.9, RANK_COLORS[stage], f"rank {rank}\nlayers {stage * 2}, {stage * 2 + 1}")
                axes.text(x + 0.525, y - 0.13, "left half" if part == 0 else "right half", ha="center", size=7)
            axes.annotate(
                "", (stage * 3.2 + 1.25, 0.45 - data * 1.9), (stage * 3.2 + 1.05, 0.45 - data * 1.9), **_ARROW
            )
        axes.annotate("", (3.2, 0.45 - data * 1.9), (2.3, 0.45 - data * 1.9), **_ARROW)
        axes.text(-0.35, 0.45 - data * 1.9, f"samples of\ndata rank {data}", ha="right", va="center", size=8)
    for x in (0.5, 1.77, 3.72, 4.97):
        axes.annotate("", (x, -0.2), (x, -1.0), **_ARROW)
    axes.text(1.15, 1.05, "tensor: halves of every layer", ha="center", size=8)
    axes.text(2.75, 0.62, "pipeline", ha="center", size=8)
    axes.text(5.7, -0.6, "data: gradients", va="center", size=8)
    axes.set_xlim(-1.6, 7.0)
    axes.set_ylim(-2.2, 1.3)
    axes.axis("off")
    figure.savefig(path, **_SAVED)


_ARROW: dict[str, Any] = {"arrowprops": {"arrowstyle": "<->", "color": "#444444", "lw": 1.0}}


def _box(axes: Any, x: float, y: float, width: float, height: float, color: str, text: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.75, edgecolor="white"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=8)


def data_axis(path: Path) -> None:
    """Predicted bytes of each ZeRO stage, GPT-2 XL on 8 data ranks."""
    shape = DecoderShape(layers=48, hidden=1600, heads=25, kv_heads=25, ffn_hidden=6400, vocab=50257, sequence=1024)
    batch = BatchShape(global_size=64, micro_size=1)
    found = {
        stage: predict(shape, MeshShape(data_parallel_size=8, zero_stage=stage), batch, "a100_x8") for stage in range(4)
    }
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(found)
    for kind in next(iter(found.values())).memory.by_name():
        sizes = [one.memory.by_name()[kind] / 1e9 for one in found.values()]
        if max(sizes) > 0.01:
            axes.barh([f"zero_stage={stage}" for stage in found], sizes, left=left, label=kind, edgecolor="white")
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GB on a rank at the worst moment (predicted)")
    axes.set_title("GPT-2 XL (1.56e9 parameters), 8 data ranks, bf16 with fp32 master weights", size=9)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    figure.savefig(path, **_SAVED)


class _Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(vocab_size=256, hidden_size=96, num_layers=2, num_heads=4, max_length=32)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def tensor_axis(path: Path) -> None:
    """The weights of one block of a GPT as the plan cuts them over two ranks."""
    training = Training(
        make=_Model,
        batch=torch.zeros(2, 33, dtype=torch.long),
        mesh=MeshSpec(data=1, pipeline=1, tensor=2),
        config=StrategyConfig(tensor_parallel_size=2),
    )
    plan = planned(training).plan.tensor
    assert plan is not None
    block = "model.blocks.0."
    rows = [row for row in plan.rows if row.name.startswith(block) and len(row.shape) == 2]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    x = 0.0
    for row in rows:
        height, width = (length / 96 for length in row.shape)
        _weight(axes, row, x, width, height)
        name = row.name.removeprefix(block).removesuffix(".weight").replace(".", "\n")
        axes.text(x + width / 2, 0.18, f"{name}\n({row.style})", ha="center", va="bottom", size=7)
        x += width + 1.1
    for rank, color in enumerate(RANK_COLORS):
        axes.barh(0, 0, color=color, label=f"on rank {rank}")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_xlim(-0.2, x)
    axes.set_ylim(-4.2, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(path, **_SAVED)


def _weight(axes: Any, row: ParameterStyle, x: float, width: float, height: float) -> None:
    """Draws a weight (rows are outputs, columns inputs) in the colours of the ranks that hold its parts."""
    from matplotlib.patches import Rectangle

    if row.layout is None:
        axes.add_patch(Rectangle((x, -height), width, height, facecolor=WHOLE, edgecolor="white"))
        return
    for rank, color in enumerate(RANK_COLORS):
        for start, length in row.layout.runs(rank, len(RANK_COLORS)):
            first, size = start / row.layout.length, length / row.layout.length
            if row.layout.dim == 0:
                corner, sides = (x, -height * (first + size)), (width, height * size)
            else:
                corner, sides = (x + width * first, -height), (width * size, height)
            axes.add_patch(Rectangle(corner, *sides, facecolor=color, alpha=0.8, edgecolor="white"))


def pipeline_axis(path: Path) -> None:
    """Three of torch's schedules in time, 4 ranks and 8 micro-batches."""
    shown = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "zbvzerobubble": 2}
    figure = Figure(figsize=(12, 2.1 * len(shown)), layout="constrained")
    longest = 0.0
    rows = figure.subplots(len(shown), sharex=True)
    for axes, (schedule, stages) in zip(rows, shown.items(), strict=True):
        # A rank has as many layers in each of them: with several stages each is a part of it.
        part = 1 / stages
        times = [StageTimes(forward=part, backward_input=part, backward_weight=part)] * (4 * stages)
        timeline = simulate(schedule, ranks=4, microbatches=8, stages_per_rank=stages, times=times)
        held = ", ".join(f"{timeline.in_flight(rank) / stages:g}" for rank in range(4))
        timeline.draw(axes, f"{schedule}: micro-batches held {held}")
        axes.set_xlabel("")
        longest = max(longest, timeline.duration)
    rows[-1].set_xlim(0, longest)
    rows[-1].set_xlabel("time, in forwards of one micro-batch through the layers of a rank")
    figure.savefig(path, **_SAVED)


def timeline(path: Path) -> None:
    """One real step of the demo, measured, beside what its schedule would be."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=demo", "trainer.max_steps=12", "callbacks=timeline", f"paths.output_dir={folder}"]
        command = [sys.executable, "-m", "lightning_3d", "train", *words]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
        found = next(Path(folder).rglob("timeline.png"))
        shutil.copyfile(found, path)


DRAWN: dict[str, Callable[[Path], None]] = {
    "mesh.svg": mesh,
    "data_axis.svg": data_axis,
    "tensor_axis.svg": tensor_axis,
    "pipeline_axis.svg": pipeline_axis,
}
MEASURED: dict[str, Callable[[Path], None]] = {"timeline.png": timeline}


def main() -> int:
    """Draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="those too that are measured")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    # The same file each time, with text as text.
    rcParams.update({"svg.hashsalt": "lightning_3d", "svg.fonttype": "none"})
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (DRAWN | (MEASURED if options.measured else {})).items():
        draw(options.folder / name)
        print(options.folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
