"""Where a program runs: on one device with plain Lightning, or on a rank of a mesh; the program cannot tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """A column of the table.

    Attributes:
        name: What it is called in the table.
        strategy: Arguments of Mesh3DStrategy; None = plain Lightning on one device.
        world: Processes.
        data: Data ranks.
    """

    name: str
    strategy: Mapping[str, Any] | None
    world: int
    data: int = 1

    @property
    def pipelined(self) -> bool:
        """Whether the layers are cut into stages."""
        return (self.strategy or {}).get("pipeline_parallel_size", 1) > 1

    def __str__(self) -> str:
        return self.name


ONE_DEVICE = Mesh(name="one device", strategy=None, world=1)
DATA_0 = Mesh(name="data 2, ZeRO 0", strategy={"zero_stage": 0}, world=2, data=2)
DATA_3 = Mesh(name="data 2, ZeRO 3", strategy={"zero_stage": 3}, world=2, data=2)
TENSOR = Mesh(name="tensor 2", strategy={"tensor_parallel_size": 2, "tensor_random": "exact"}, world=2)
PIPELINE = Mesh(name="pipeline 2", strategy={"pipeline_parallel_size": 2}, world=2)
CUBE = Mesh(
    name="2 x 2 x 2",
    strategy={"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "tensor_random": "exact"},
    world=8,
    data=2,
)
MESHES = (DATA_0, DATA_3, TENSOR, PIPELINE, CUBE)


@dataclass(frozen=True, slots=True)
class Mine:
    """What a data rank has of batches that are dealt out among the data ranks, as predictions.

    Attributes:
        values: A tensor or a list for each batch; those of all data ranks, joined batch by batch, are one device's.
    """

    values: Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """This process in a run of a program.

    Attributes:
        mesh: The mesh, or one device.
        rank: This process' rank.
        directory: A directory of this run, the same on all ranks, empty at first.
        options: More arguments of Mesh3DStrategy, left out on one device.
    """

    mesh: Mesh
    rank: int
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def trainer(self, *callbacks: Callback, **options: Any) -> Trainer:
        """Returns a Trainer that is the same everywhere but for its strategy: in fp64, quiet, on the CPU."""
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "precision": "64-true",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "default_root_dir": self.directory,
        }
        quiet |= {"max_epochs": 1} if "max_steps" not in options else {}
        where = {"devices": self.mesh.world, "strategy": self.strategy()}
        return L.Trainer(**(quiet | where | options), callbacks=list(callbacks))

    def strategy(self) -> Mesh3DStrategy | str:
        """Returns what stands in the one argument that differs."""
        if self.mesh.strategy is None:
            return "auto"
        return Mesh3DStrategy(**{**self.mesh.strategy, **self.options})

    def loader(self, samples: Sized, batch_size: int, **options: Any) -> DataLoader[Any]:
        """Returns a loader whose batches of all data ranks together have ``batch_size`` samples."""
        assert batch_size % self.mesh.data == 0
        return DataLoader(samples, batch_size=batch_size // self.mesh.data, **options)  # type: ignore[arg-type]
