"""Checkpoints of every mesh on every other one, twice in a row. As a program: all pairs, written to docs/resharding.md.

A training of nine steps in the middle of an epoch: three on the first mesh, three on the second, which resumes the
first one's checkpoint, three on a third, which resumes the second one's. Each stretch is compared with the training on
one device that was never interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DPrecision
from tests.faults.language import Language, Sentences
from tests.parity.measure import error, whole
from tests.spmd.fits import trainer
from tests.spmd.pool import run_spmd

PAGE = Path(__file__).parents[2] / "docs" / "resharding.md"
COMMAND = "python -m tests.faults.matrix"
STEPS, BATCH = 3, 8
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_BOUND, MOMENT_BOUND, PARAMETER_BOUND = 1e-12, 1e-10, 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """A mesh by its name in the table.

    Attributes:
        data: Degree of the data axis.
        pipeline: Degree of the pipeline axis.
        tensor: Degree of the tensor axis.
        options: More arguments of the strategy.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def strategy(self) -> dict[str, Any]:
        """Arguments of Mesh3DStrategy."""
        sizes = {f"{axis}_parallel_size": getattr(self, axis) for axis in ("data", "pipeline", "tensor")}
        return {**sizes, "pad_vocabulary": self.tensor > 1, **self.options}


MESHES = {
    "1": Mesh(),
    "data 4, zero 3": Mesh(data=4, options={"zero_stage": 3}),
    "tensor 4": Mesh(tensor=4),
    "pipeline 4": Mesh(pipeline=4, options={"num_microbatches": 4}),
    "2 x 1 x 2": Mesh(data=2, tensor=2, options={"zero_stage": 2}),
    "1 x 2 x 2": Mesh(pipeline=2, tensor=2, options={"num_microbatches": 2}),
    "2 x 2 x 2": Mesh(data=2, pipeline=2, tensor=2, options={"num_microbatches": 2, "zero_stage": 1}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Three steps of the training.

    Attributes:
        first: How many steps were made before.
        source: The checkpoint that it resumes, or None at the beginning.
        target: Where its own checkpoint goes.
    """

    first: int
    source: Path | None
    target: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Off:
    """How far a stretch is from the training that was not interrupted, each number relative as `error` says.

    Attributes:
        loss: Of its losses.
        moments: Of AdamW's moments at its end.
        parameters: Of the parameters at its end.
        restored: Whether weights and moments that it began with are those that were saved, to the bit.
    """

    loss: float
    moments: float
    parameters: float
    restored: bool

    @property
    def equal(self) -> bool:
        """Whether all is within DESIGN's bounds for fp64."""
        near = self.loss <= LOSS_BOUND and self.moments <= MOMENT_BOUND and self.parameters <= PARAMETER_BOUND
        return near and self.restored


class Told(Callback):
    """Writes down losses and, before and after the steps, whole parameters and moments.

    Args:
        ends: The numbers of steps after which to write.
    """

    def __init__(self, ends: Iterable[int]) -> None:
        self.ends = frozenset(ends)
        self.losses: list[float] = []
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.states[trainer.global_step] = state_of(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))
        if trainer.global_step in self.ends:
            self.states[trainer.global_step] = state_of(trainer, pl_module)


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Returns whole parameters and moments by name; none of the moments before the first step."""
    (optimizer,) = trainer.optimizers
    parameters = dict(module.named_parameters())
    found = whole(dict(parameters), trainer)
    for key in MOMENTS if trainer.global_step else ():
        state = {name: optimizer.state.get(parameter, {}).get(key) for name, parameter in parameters.items()}
        found |= {f"{key} {name}": tensor for name, tensor in whole(state, trainer).items()}
    return found


def train(mesh: Mesh, stretch: Stretch, ends: Iterable[int]) -> Told:
    """Trains until the last of ``ends``, and saves in the middle of an epoch, as users do."""
    L.seed_everything(7, verbose=False)
    told, name = Told(ends), stretch.target
    saver = ModelCheckpoint(name.parent, name.stem, every_n_train_steps=STEPS, enable_version_counter=False)
    run = trainer(
        mesh.world,
        told,
        saver,
        strategy=mesh.strategy,
        plugins=Mesh3DPrecision("64-true"),
        max_steps=max(told.ends),
        max_epochs=1,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
    )
    data = DataLoader(Sentences(), BATCH // mesh.data, shuffle=True)
    run.fit(Language(schedule=4 * STEPS), data, ckpt_path=stretch.source)
    return told


def unbroken(rank: int, world: int, directory: Path) -> None:
    """Trains on one device without a stop, and writes what all others are compared with."""
    ends = [STEPS, 2 * STEPS, 3 * STEPS]
    told = train(MESHES["1"], Stretch(first=0, source=None, target=directory / "unbroken.ckpt"), ends)
    torch.save({"losses": told.losses, "states": told.states}, directory / "unbroken.pt")


def stretches(rank: int, world: int, mesh: str, jobs: Sequence[Stretch], directory: Path) -> list[Off]:
    """Trains stretches on one mesh, one after the other, and compares each on every rank."""
    expected = torch.load(directory / "unbroken.pt")
    found = []
    for job in jobs:
        end = job.first + STEPS
        told = train(MESHES[mesh], job, [end])
        saved = None if job.source is None else torch.load(_beside(job.source))
        found.append(compare(told, expected, job.first, saved))
        if rank == 0:
            torch.save(told.states[end], _beside(job.target))
    return found


def compare(told: Told, expected: dict[str, Any], first: int, saved: dict[str, Tensor] | None) -> Off:
    """Compares a stretch with the training that was not interrupted."""
    begin, end = expected["states"][0], expected["states"][first + STEPS]
    mine = told.states[first + STEPS]
    assert mine.keys() == end.keys()
    names = [name for name in begin if name in end]
    update = max(float((end[name] - begin[name]).abs().max()) for name in names)
    moments = []
    for key in MOMENTS:
        kind = {name: value for name, value in end.items() if name.startswith(f"{key} ")}
        assert kind.keys() == {f"{key} {name}" for name in names}
        largest = max(float(value.abs().max()) for value in kind.values())
        moments += [error(mine[name], value, largest) for name, value in kind.items()]
    losses = expected["losses"][first : first + STEPS]
    return Off(
        loss=max(abs(a - b) / abs(b) for a, b in zip(told.losses, losses, strict=True)),
        moments=max(moments),
        parameters=max(error(mine[name], end[name], update) for name in names),
        restored=saved is None or _same(told.states[first], saved),
    )


def _same(found: dict[str, Tensor], saved: dict[str, Tensor]) -> bool:
    return found.keys() == saved.keys() and all(torch.equal(found[name], value) for name, value in saved.items())


def _beside(checkpoint: Path) -> Path:
    """Where the whole state that a checkpoint must hold is written."""
    return checkpoint.with_suffix(".state")


# ---- all pairs ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A checkpoint of one mesh on another, and that one's on a third.

    Attributes:
        names: The three meshes.
        hops: How far the second and third stretch are off.
    """

    names: tuple[str, str, str]
    hops: tuple[Off, Off]

    @property
    def equal(self) -> bool:
        """Whether both are equal."""
        return all(hop.equal for hop in self.hops)


class Matrix:
    """Runs pairs of meshes; every mesh saves once, whatever resumes it.

    Args:
        directory: Where checkpoints are written.
        seconds: The longest that one training may take.
    """

    def __init__(self, directory: Path, seconds: float = 60) -> None:
        self._directory, self._seconds = directory, seconds

    def run(self, trips: Sequence[tuple[str, str, str]]) -> list[Pair]:
        """Runs trips of three meshes each: the first saves, the second resumes and saves, the third resumes."""
        run_spmd(unbroken, 1, self._directory, timeout=self._seconds)
        firsts = {(first,): None for first, _, _ in trips}
        self._check_first(self._hop(list(firsts)))
        second = self._hop(list(dict.fromkeys(trip[:2] for trip in trips)))
        third = self._hop(list(dict.fromkeys(trips)))
        return [Pair(names=trip, hops=(second[trip[:2]], third[trip])) for trip in trips]

    def _hop(self, ways: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Off]:
        """Trains one stretch at the end of each way, mesh by mesh."""
        found: dict[tuple[str, ...], Off] = {}
        for mesh in dict.fromkeys(way[-1] for way in ways):
            mine = [way for way in ways if way[-1] == mesh]
            jobs = [self._stretch(way) for way in mine]
            world, limit = MESHES[mesh].world, self._seconds * len(jobs)
            start = time.monotonic()
            of_ranks = run_spmd(stretches, world, mesh, jobs, self._directory, timeout=limit)
            print(f"{len(jobs)} x {STEPS} steps on {mesh}: {time.monotonic() - start:.0f} s", flush=True)
            found |= {way: _worst([of_rank[at] for of_rank in of_ranks]) for at, way in enumerate(mine)}
        return found

    def _stretch(self, way: tuple[str, ...]) -> Stretch:
        source = self._path(way[:-1]) if len(way) > 1 else None
        return Stretch(first=STEPS * (len(way) - 1), source=source, target=self._path(way))

    def _path(self, way: tuple[str, ...]) -> Path:
        places = [*MESHES]
        return self._directory / ("-".join(str(places.index(name)) for name in way) + ".ckpt")

    @staticmethod
    def _check_first(found: dict[tuple[str, ...], Off]) -> None:
        wrong = {way[0]: off for way, off in found.items() if not off.equal}
        assert not wrong, f"the meshes differ before anything was saved: {wrong}"


def _worst(offs: Sequence[Off]) -> Off:
    return Off(
        loss=max(off.loss for off in offs),
        moments=max(off.moments for off in offs),
        parameters=max(off.parameters for off in offs),
        restored=all(off.restored for off in offs),
    )


def trips(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns all pairs of meshes, each going on to a third, so that all pairs come up as second and third too."""
    count = len(names)
    return [(first, second, names[(i + j) % count]) for i, first in enumerate(names) for j, second in enumerate(names)]


_HEAD = """# Checkpoints on every mesh

Every row is a training of {steps} clipped AdamW steps of a small GPT-2 of Hugging Face in fp64, tied and with packed
projections, in the middle of an epoch of shuffled data: {stretch} steps on the first mesh, which saves; {stretch} on
the second, which resumes that checkpoint and saves again; {stretch} on the third, which resumes the second one's.
Meshes are data x pipeline x tensor. Columns are the largest relative differences, on any rank, from the training on
one device that nothing interrupts: of the losses of these steps, and at their end of AdamW's moments and of the
parameters. *restored*: weights and moments after loading are those that were saved, to the bit. Bounds:
{loss:.0e} (losses), {moments:.0e} (moments), {parameters:.0e} (parameters).

{equal} of {count} rows are within their bounds. Made by `{command}` on {date} with torch
{torch}, Python {python}, in {minutes:.0f} minutes.

| from | to | losses | moments | parameters | then to | losses | moments | parameters | restored | within |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(pairs: Sequence[Pair], seconds: float) -> str:
    """Returns the page of all pairs."""
    head = _HEAD.format(
        steps=3 * STEPS,
        stretch={3: "three"}.get(STEPS, STEPS),
        loss=LOSS_BOUND,
        moments=MOMENT_BOUND,
        parameters=PARAMETER_BOUND,
        equal=sum(pair.equal for pair in pairs),
        count=len(pairs),
        command=COMMAND,
        date=datetime.date.today(),
        torch=torch.__version__,
        python=platform.python_version(),
        minutes=seconds / 60,
    )
    lines = []
    for pair in pairs:
        one, other = ([f"{hop.loss:.1e}", f"{hop.moments:.1e}", f"{hop.parameters:.1e}"] for hop in pair.hops)
        restored = "yes" if all(hop.restored for hop in pair.hops) else "**no**"
        verdict = "yes" if pair.equal else "**no**"
        cells = [pair.names[0], pair.names[1], *one, pair.names[2], *other, restored, verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n"


def main(arguments: Iterable[str]) -> int:
    """Runs all pairs; returns 1 if one is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", action="append", choices=[*MESHES], help="only among these meshes; writes no page")
    names = parser.parse_args(list(arguments)).mesh or [*MESHES]
    directory, start = Path(tempfile.mkdtemp(prefix="matrix-")), time.monotonic()
    try:
        pairs = Matrix(directory).run(trips(names))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for pair in pairs:
        print(f"{'ok  ' if pair.equal else 'FAIL'} {' -> '.join(pair.names)}: {pair.hops}", flush=True)
    if len(names) == len(MESHES):
        PAGE.write_text(page(pairs, time.monotonic() - start))
    return int(not all(pair.equal for pair in pairs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
