"""Playing ranks of a training one after the other: which ones, and what all of it has shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_3d.dryrun.beside import Predictor
from lightning_3d.dryrun.planned import Planned, planned
from lightning_3d.dryrun.rank import run_rank
from lightning_3d.dryrun.report import DryRunReport
from lightning_3d.dryrun.training import Training
from lightning_3d.errors import Lightning3DError
from lightning_3d.mesh.spec import Coordinate, MeshSpec
from lightning_3d.planner.model import ModelGraph


def dry_run(
    training: Training,
    coordinates: Sequence[Coordinate] | None = None,
    *,
    samples: int = 0,
    all_microbatches: bool = False,
    price: Callable[[], ModelGraph] | None = None,
) -> DryRunReport:
    """Runs an optimizer step of some ranks of a training, without memory and without other ranks.

    The plan is the one that training makes, and it is applied by the same code, on torch's fake process group, in which
    collectives return at once, and on FakeTensors. Bytes are those of tensors on the CPU: an accelerator's kernels may
    keep other temporaries.

    Args:
        training: The training.
        coordinates: Which ranks; None for one rank of each stage that differs, from `representatives`.
        samples: At how many moments of the step to look at what is alive, for a picture.
        all_microbatches: Play those too that do what others have done; else the collectives of a middle one count for
            them.
        price: Gives the price of the module, from which the planner predicts what stands beside each rank; None for no
            prediction.

    Raises:
        MeshError: The process is a rank of a real world, or a coordinate lies outside of the mesh.
        Lightning3DError: What the strategy would refuse.
    """
    begin = time.perf_counter()
    found = planned(training, all_microbatches=all_microbatches)
    chosen = representatives(training.mesh) if coordinates is None else coordinates
    ranks = tuple(run_rank(found, at, samples=samples) for at in chosen)
    notes = _notes(found)
    if price is not None:
        try:
            predictor = Predictor(found, price())
            ranks = tuple(
                replace(rank, beside=predictor.beside(rank.at.pipeline, rank.peak, rank.traffic)) for rank in ranks
            )
        except Lightning3DError as error:
            notes = (*notes, unpriced(error))
    return DryRunReport(
        plan=found.plan,
        precision=training.precision,
        microbatches=found.sizes,
        batches=training.accumulate,
        ranks=ranks,
        notes=notes,
        seconds=time.perf_counter() - begin,
    )


def unpriced(error: Lightning3DError) -> str:
    """Returns why nothing is predicted, in one line.

    Args:
        error: The planner's.
    """
    return f"the planner has no price for this: {str(error).splitlines()[0]}"


def representatives(mesh: MeshSpec) -> tuple[Coordinate, ...]:
    """Returns the coordinates of the first pipeline rank, of the second and of the last.

    Ranks that differ on the data and tensor axes alone do the same. Of the ranks between the first and the last the
    second has the most micro-batches in flight.
    """
    return tuple(mesh.at(pipeline=rank) for rank in sorted({0, min(1, mesh.pipeline - 1), mesh.pipeline - 1}))


def _notes(found: Planned) -> tuple[str, ...]:
    plan, config = found.plan, found.training.config
    notes = []
    if plan.data.engine == "ddp":
        notes.append(
            "DistributedDataParallel reads memory, so ranks run without it: their gradients stay as its buckets do, "
            "and its collectives are priced, not counted"
        )
    if config.compile:
        notes.append("compile=True is left out: blocks run as they are, so what compiled ones save is not seen")
    if found.training.precision == "16-mixed":
        notes.append("the loss scale is left out: a few numbers")
    return tuple(notes)
