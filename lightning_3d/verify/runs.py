"""Trainings of one subject on meshes of different sizes, all on the same global micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lightning_3d.mesh.spec import AXIS_KEYS, MeshSpec
from lightning_3d.verify.job import FitOrder, TakeOrder, fit, mesh_of, take_batches
from lightning_3d.verify.processes import Crew
from lightning_3d.verify.record import Record
from lightning_3d.verify.subject import Subject

# What is no matter of the mesh, and so holds on one device as well.
_OF_BOTH = ("layout_free_random", "pretrained", "pretrained_strict", "on_nonfinite", "timeout_seconds")
_OF_PIPELINE = ("pipeline_schedule", "stages_per_rank", "layers_per_stage", "pipeline_stack")
_OF_TENSOR = ("sequence_parallel", "tensor_plan", "pad_vocabulary", "tensor_random")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to train.

    Attributes:
        subject: Makes the module and the data.
        layers: Blocks of a stack that stay; None for all.
        options: The strategy's.
        world: Ranks of its mesh.
        steps: Optimizer steps.
        trainer: Further arguments of the Trainer.
        seed: Of every generator.
        seconds: Time that each training may take.
        preload: Modules that the subject needs.
    """

    subject: Subject
    layers: int | None
    options: Mapping[str, Any]
    world: int
    steps: int
    trainer: Mapping[str, Any]
    seed: int
    seconds: float
    preload: tuple[str, ...] = ()

    @property
    def accumulate(self) -> int:
        """Batches of an optimizer step."""
        return int(self.trainer.get("accumulate_grad_batches", 1))

    @property
    def mesh(self) -> MeshSpec:
        """The whole mesh."""
        return mesh_of(dict(self.options), self.world)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a training left.

    Attributes:
        record: What it did.
        directory: Its files, with the traces of the ranks.
        mesh: Where it ran.
        facts: What the first rank told.
        digests: Of each rank's record.
    """

    record: Record
    directory: Path
    mesh: MeshSpec
    facts: Mapping[str, Any]
    digests: tuple[str, ...]

    def trace(self, rank: int) -> dict[str, Any]:
        """Returns what a rank saw inside of its first batch."""
        found: dict[str, Any] = torch.load(self.directory / f"trace{rank}.pt", weights_only=True)
        return found


class Runs(AbstractContextManager["Runs"]):
    """Runs trainings in processes of their own; their files last as long as the context.

    Args:
        request: What to train.

    Attributes:
        told: What taking the batches told; known inside of the context.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.told: dict[str, Any] = {}
        self._count = 0

    def __enter__(self) -> Runs:
        self._home = tempfile.TemporaryDirectory(prefix="lightning-3d-verify-")
        try:
            self._take_batches()
        except BaseException:
            # Nobody leaves what was not entered.
            self._home.cleanup()
            raise
        return self

    def _take_batches(self) -> None:
        directory, request = self._new(), self.request
        order = TakeOrder(
            subject=request.subject,
            layers=request.layers,
            options=dict(request.options),
            data_ranks=request.mesh.data,
            count=request.steps * request.accumulate,
            directory=directory,
        )
        self._batches = directory
        (self.told,) = self._crew(directory).run(take_batches, 1, order)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._home.cleanup()

    @property
    def microbatches(self) -> tuple[int, int]:
        """Micro-batches of a batch: on each data rank, and on one device."""
        own = int(self.told["microbatches"])
        return own, own * self.request.mesh.data

    def alone(self, precision: str, *, watch: bool = False, trace: bool = False) -> Trained:
        """Trains on one device, on the micro-batches of all data ranks."""
        options = {name: value for name, value in self.request.options.items() if name in _OF_BOTH}
        options["num_microbatches"] = self.microbatches[1]
        return self._fit(options, precision, watch=watch, trace=trace)

    def on(
        self, axes: tuple[str, ...], precision: str, *, trace: bool = False, changes: Mapping[str, Any] | None = None
    ) -> Trained:
        """Trains on a mesh that has only some of the axes, each with its degree.

        Args:
            axes: Some of `AXIS_KEYS`.
            precision: Name of the precision.
            trace: Keep what modules return.
            changes: Options that differ from the request's.
        """
        return self._fit(self.options_on(axes) | dict(changes or {}), precision, trace=trace)

    def options_on(self, axes: tuple[str, ...]) -> dict[str, Any]:
        """Returns the strategy's options on a mesh that has only some of the axes."""
        mesh = self.request.mesh
        options = dict(self.request.options)
        for axis in AXIS_KEYS:
            options[f"{axis}_parallel_size"] = getattr(mesh, axis) if axis in axes else 1
        if "data" not in axes:
            options |= {"data_replicate_size": 1}
        dropped = (*(() if "pipeline" in axes else _OF_PIPELINE), *(() if "tensor" in axes else _OF_TENSOR))
        options = {name: value for name, value in options.items() if name not in dropped}
        # A batch that data ranks shared is one rank's now, with all of their micro-batches.
        options |= {"num_microbatches": self.microbatches["data" not in axes], "micro_batch_size": None}
        if "tensor" in axes and mesh.tensor > 1:
            options["tensor_random"] = "exact"
        return options

    def _fit(self, options: dict[str, Any], precision: str, *, watch: bool = False, trace: bool = False) -> Trained:
        request, directory = self.request, self._new()
        world = 1
        for axis in AXIS_KEYS:
            world *= options.get(f"{axis}_parallel_size", 1)
        order = FitOrder(
            subject=request.subject,
            layers=request.layers,
            options=options,
            trainer=dict(request.trainer),
            precision=precision,
            seed=request.seed,
            batches=self._batches,
            directory=directory,
            world=world,
            watch=watch,
            trace=trace,
        )
        told = self._crew(directory).run(fit, world, order)
        return Trained(
            record=Record.read(directory),
            directory=directory,
            mesh=mesh_of(options, world),
            facts=told[0],
            digests=tuple(each["digest"] for each in told),
        )

    def _crew(self, directory: Path) -> Crew:
        return Crew(directory=directory, seconds=self.request.seconds, preload=self.request.preload)

    def _new(self) -> Path:
        self._count += 1
        directory = Path(self._home.name) / str(self._count)
        directory.mkdir()
        return directory
