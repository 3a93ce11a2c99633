"""Whether a recorded step is the one that the plan was made for, and the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.record.step import ConstantLeaf, StepRecord, Structure

_FIX = "let the first batch be one for which the step uses all of it, or give it the same way through the module"


def check_record(record: StepRecord, plan: PipelinePlan) -> None:
    """Refuses a step that does not run on the stages of a plan.

    Args:
        record: What the step does.
        plan: The plan.

    Raises:
        PlanError: It calls blocks in another order, or uses parameters or modules on stages that do not have them.
    """
    if record.blocks != plan.blocks:
        changed = next(pair for pair in zip(record.blocks, plan.blocks, strict=True) if pair[0] != pair[1])
        raise PlanError(
            f"with this batch the step calls {changed[0]} where it called {changed[1]} when the plan was made.",
            fix="let the order of the blocks be the same for every batch",
        )
    _check(record.modules, plan.modules, plan, "calls")
    _check(record.parameters, plan.holders, plan, "uses")


def digest(record: StepRecord) -> str:
    """Returns what is equal for records that say the same; contents of constants are left out."""
    calls = [
        (
            call.module,
            call.call,
            call.position,
            _shown(call.output),
            [(*each[:2], _shown(each[2])) for each in call.inside],
        )
        for call in record.calls
    ]
    uses = [
        sorted((name, sorted(found)) for name, found in each.items()) for each in (record.parameters, record.modules)
    ]
    return hashlib.sha256(repr((record.blocks, calls, record.boundaries, uses)).encode()).hexdigest()


def _check(
    found: Mapping[str, frozenset[int]], planned: Mapping[str, tuple[int, ...]], plan: PipelinePlan, does: str
) -> None:
    for name, positions in found.items():
        for position in sorted(positions):
            block = max(position - 1, 0)
            stage = next(stage.index for stage in plan.stages if stage.first <= block < stage.end)
            if stage not in planned[name]:
                have = ", ".join(map(str, planned[name]))
                raise PlanError(
                    f"with this batch the step {does} {name} on stage {stage}, and the plan put it on stage {have}, "
                    "where the first batch used it.",
                    fix=_FIX,
                )


def _shown(structure: Structure) -> list[str]:
    leaves = ("constant" if isinstance(leaf, ConstantLeaf) else repr(leaf) for leaf in structure.leaves)
    return [*leaves, str(structure.spec)]
