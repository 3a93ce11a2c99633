"""What a rank does: take batches once, or train a few steps and write down what happened."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import DataLoader

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.graph.blocks import modules_with_statistics
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.strategy import Mesh3DStrategy
from lightning_3d.verify.batches import Batches, take
from lightning_3d.verify.inside import Trace, Watch
from lightning_3d.verify.record import Recorder
from lightning_3d.verify.subject import Subject, check_cut, shrink

BATCHES = "batches.pkl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOrder:
    """Batches to take.

    Attributes:
        subject: Makes the module and the data.
        layers: Blocks of a stack that stay.
        options: The strategy's, of the whole mesh.
        data_ranks: Its data ranks.
        count: Batches of the run.
        directory: Where they are written.
    """

    subject: Subject
    layers: int | None
    options: dict[str, Any]
    data_ranks: int
    count: int
    directory: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOrder:
    """A training to run.

    Attributes:
        subject: Makes the module.
        layers: Blocks of a stack that stay.
        options: The strategy's.
        trainer: Further arguments of the Trainer.
        precision: Name of the precision.
        seed: Of every generator.
        batches: Directory of the batches.
        directory: Where the record is written.
        world: Number of ranks.
        watch: Look for random draws and narrow numbers, on one device.
        trace: Keep what modules return.
    """

    subject: Subject
    layers: int | None
    options: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    precision: str
    seed: int
    batches: Path
    directory: Path
    world: int
    watch: bool = False
    trace: bool = False


def mesh_of(options: dict[str, Any], world: int) -> MeshSpec:
    """Returns the mesh of a strategy's options.

    Raises:
        MeshError: The degrees do not make the world.
    """
    return MeshSpec.of(StrategyConfig.from_mapping(options), world)


def take_batches(rank: int, order: TakeOrder) -> dict[str, Any]:
    """Writes the batches of both runs, and returns what is to be told of them and of the module."""
    module, data = order.subject.build()
    cuts = shrink(module, order.layers)
    config = StrategyConfig.from_mapping(order.options)
    batches = take(module, data, config, count=order.count, data_ranks=order.data_ranks)
    # Now, where one error can be told before any rank waits for another.
    batches.whole()
    with (order.directory / BATCHES).open("wb") as file:
        pickle.dump(batches, file)
    return {
        "microbatches": batches.microbatches,
        "left_out": batches.left_out,
        "module": type(module).__name__,
        "cuts": [str(cut) for cut in cuts()],
    }


def fit(rank: int, order: FitOrder) -> dict[str, Any]:
    """Trains on the given batches; the first rank writes the record, and every rank its trace.

    Returns:
        How large the module was, and what was cut.
    """
    module, _ = order.subject.build()
    cuts = shrink(module, order.layers)
    strategy = Mesh3DStrategy(**order.options)
    spec = mesh_of(order.options, order.world)
    with (order.batches / BATCHES).open("rb") as file:
        given: Batches = pickle.load(file)
    at = spec.coordinate(rank).data
    mine = given.whole() if spec.data == 1 else [share[at] for share in given.shares]
    seed_everything(order.seed, workers=True, verbose=False)
    recorder, seen = Recorder(), _Seen(watch=order.watch, trace=order.trace, inner=spec.tensor == 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=order.world,
        strategy=strategy,
        plugins=Mesh3DPrecision(order.precision),
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[recorder, *seen.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **order.trainer,
    )
    trainer.fit(module, DataLoader(mine, batch_size=None, collate_fn=_as_it_is))  # type: ignore[arg-type]
    check_cut(module, order.layers, cuts())
    if rank == 0:
        recorder.record.watched = seen.watched()
        recorder.record.write(order.directory)
    if seen.trace is not None:
        torch.save(seen.trace.state(), order.directory / f"trace{rank}.pt")
    return {
        "cuts": [str(cut) for cut in cuts()],
        "statistics": statistics(module),
        "digest": recorder.record.digest(),
    }


class _Seen:
    """The callbacks that look inside, where they are asked for."""

    def __init__(self, *, watch: bool, trace: bool, inner: bool) -> None:
        self._watch = Watch() if watch else None
        self.trace = Trace(inner=inner) if trace else None

    @property
    def callbacks(self) -> list[Callback]:
        return [each for each in (self._watch, self.trace) if each is not None]

    def watched(self) -> dict[str, Any]:
        if self._watch is None:
            return {}
        return {"draws": dict(self._watch.draws), "narrow": dict(self._watch.narrow)}


def statistics(module: LightningModule) -> list[str]:
    """Returns the names of running statistics, which are those of each micro-batch in turn."""
    names = modules_with_statistics(module)
    return [f"{name}.{key}" for name in names for key in module.get_submodule(name)._buffers]


def _as_it_is(batch: Any) -> Any:
    return batch
