"""The search for the place of a difference: which axes, which module, which gradient, and what makes it go away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES
from lightning_3d.errors import Lightning3DError, RunError, few_and_more
from lightning_3d.log import get_logger
from lightning_3d.mesh.spec import AXIS_KEYS, MeshSpec
from lightning_3d.verify.certificate import Place
from lightning_3d.verify.comparison import Bounds, Check, compare, error, same_everywhere
from lightning_3d.verify.record import Record
from lightning_3d.verify.runs import Runs, Trained

_log = get_logger(__name__)

_MOST_NAMED = 5
# A block's values grow out of those before it, so that more than its own rounding is in them.
_FORWARD_SLACK = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a search stands on.

    Attributes:
        runs: Runs trainings.
        precision: Name of the precision.
        bounds: What rounding explains.
        expected: What one device did.
        unlike_buffers: Names of buffers that are not meant to be equal.
    """

    runs: Runs
    precision: str
    bounds: Bounds
    expected: Record
    unlike_buffers: tuple[str, ...] = ()

    def checks(self, found: Trained) -> list[Check]:
        """Returns how far a run is off one device."""
        checks = compare(found.record, self.expected, self.bounds, unlike_buffers=self.unlike_buffers)
        return [*checks, same_everywhere(found.digests)]

    def differs(self, axes: tuple[str, ...], changes: Mapping[str, Any] | None = None) -> bool | None:
        """Whether a run on some axes is off; None if it cannot be run."""
        try:
            found = self.runs.on(axes, self.precision, changes=changes)
        except Lightning3DError as error_of_run:
            _log.info("verify: %s cannot run: %s", " x ".join(axes), str(error_of_run).splitlines()[0])
            return None
        return any(check.wrong for check in self.checks(found))


def place_on_mesh(ground: Ground, checks: Sequence[Check]) -> Place:
    """Returns where a mesh goes another way than one device.

    Args:
        ground: What is known.
        checks: What is wrong on the whole mesh.
    """
    mesh = ground.runs.request.mesh
    present = tuple(axis for axis in AXIS_KEYS if getattr(mesh, axis) > 1)
    facts: list[str] = []
    axes = present
    for some in _smaller(present):
        differs = ground.differs(some)
        words = {True: "differs", False: "is equal", None: "cannot run"}[differs]
        facts.append(f"{_mesh_words(mesh, some)} alone {words}")
        if differs:
            axes = some
            break
    facts += _first_gradients(checks)
    module, seen = _first_module(ground, axes)
    facts += seen
    advice = list(_advice(ground, axes, module))
    return Place(axes=axes, facts=tuple(facts), advice=tuple(advice))


def place_alone(runs: Runs, precision: str, first_difference: str) -> Place:
    """Returns which module gives something else the second time on one device."""
    first, second = (runs.alone(precision, trace=True) for _ in range(2))
    mine, theirs = first.trace(0), second.trace(0)
    facts = [f"two runs differ first in {first_difference}"]
    found = next(_unlike(mine, theirs, bound=0.0), None)
    if found is None:
        facts.append(
            "every module gives the same in the first batch: it is the step itself, the backward or a later one"
        )
        advice: tuple[str, ...] = ("look for what the step draws or reads from outside, such as time or a set's order",)
    else:
        name, number, off = found
        facts.append(
            f"'{name}' ({_kind(name, mine)}) is the first module that gives something else, by {off:.1e}, in call "
            f"{number} of the first batch"
        )
        advice = (
            f"make '{name}' draw from torch's default generator, which is seeded, or from one that it seeds itself",
            "Trainer(deterministic=True) names operations that are not deterministic",
        )
    return Place(axes=None, facts=tuple(facts), advice=advice)


def place_of_failure(runs: Runs, precision: str, failure: RunError) -> Place:
    """Returns on which axes a module cannot run that runs on one device.

    Args:
        runs: Runs trainings.
        precision: Name of the precision.
        failure: What happened on the whole mesh.
    """
    mesh = runs.request.mesh
    axes = present = tuple(axis for axis in AXIS_KEYS if getattr(mesh, axis) > 1)
    facts = []
    for some in _smaller(present):
        try:
            runs.on(some, precision)
        except RunError:
            facts.append(f"{_mesh_words(mesh, some)} alone fails")
            axes = some
            break
        except Lightning3DError as refused:
            _log.info("verify: %s cannot run: %s", " x ".join(some), str(refused).splitlines()[0])
            facts.append(f"{_mesh_words(mesh, some)} alone cannot run")
            continue
        facts.append(f"{_mesh_words(mesh, some)} alone runs")
    return Place(axes=axes, facts=(*facts, *str(failure).splitlines()), advice=())


def _smaller(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(axes)):
        yield from combinations(axes, size)


def _mesh_words(mesh: MeshSpec, axes: tuple[str, ...]) -> str:
    return " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in axes)


def _first_gradients(checks: Sequence[Check]) -> list[str]:
    facts = []
    start = next((check for check in checks if check.kind == "initial weights"), None)
    if start is not None and start.wrong:
        facts.append(f"initial weights differ already: {_named(each.name for each in start.wrong)}")
    gradients = next((check for check in checks if check.kind == "gradients"), None)
    if gradients is not None and gradients.wrong:
        step = gradients.wrong[0].step
        wrong = [each for each in gradients.wrong if each.step == step]
        count = sum(each.step == step for each in gradients.differences)
        largest = max(wrong, key=lambda each: each.error)
        # Gradients are computed from the end of the model to its beginning.
        facts.append(
            f"in optimizer step {step} {len(wrong)} of {count} gradients differ: on the way back from the loss "
            f"'{wrong[-1].name}' first ({wrong[-1].error:.1e}), '{largest.name}' most ({largest.error:.1e})"
        )
    return facts


def _first_module(ground: Ground, axes: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Returns the first module whose values differ in the first batch, and what is known of it."""
    try:
        alone = ground.runs.alone(ground.precision, trace=True)
        found = ground.runs.on(axes, ground.precision, trace=True)
    except Lightning3DError as problem:
        return None, [f"modules were not looked at: {str(problem).splitlines()[0]}"]
    expected, bound = alone.trace(0), _FORWARD_SLACK * ground.bounds.scalar
    named: list[tuple[int, str, int, float, int]] = []
    compared = 0
    for rank, trace, shift in _traces(found):
        order = {call: at for at, call in enumerate(map(tuple, expected["calls"]))}
        compared += len(trace["calls"])
        for name, number, off in _unlike(trace, expected, bound=bound, shift=shift):
            named.append((order[(name, number)], name, number, off, rank))
    if not named:
        return None, [f"in the first batch {compared} values of modules are equal: look at the loss and the backward"]
    _, name, number, off, rank = min(named)
    facts = [
        f"'{name}' ({_kind(name, expected)}) is the first module that gives something else in the first "
        f"batch: by {off:.1e}, in call {number} of one device, on rank {rank} of {found.mesh}"
    ]
    changed = [
        f"'{module}' changes {_named(keys)}" for module, keys in expected["changed"].items() if _inside(module, name)
    ]
    if changed:
        facts.append(f"state besides its inputs: {'; '.join(changed)} while it computes")
    return name, facts


def _traces(found: Trained) -> Iterator[tuple[int, dict[str, Any], Mapping[str, int]]]:
    """Traces of the ranks, with the first call on one device of each module that a rank calls."""
    for rank in range(found.mesh.world):
        trace, data = found.trace(rank), found.mesh.coordinate(rank).data
        counts: dict[str, int] = {}
        for name, number in trace["calls"]:
            counts[name] = max(counts.get(name, 0), number + 1)
        yield rank, trace, {name: data * count for name, count in counts.items()}


def _unlike(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, bound: float, shift: Mapping[str, int] | None = None
) -> Iterator[tuple[str, int, float]]:
    """Calls that gave something else, with their number on one device, in the order of the run that is looked at."""
    values: dict[tuple[str, int], Tensor] = {}
    for (name, number), value in zip(expected["calls"], expected["values"], strict=True):
        values[(name, number)] = value
    for (name, number), value in zip(found["calls"], found["values"], strict=True):
        there = (name, number + (shift or {}).get(name, 0))
        other = values.get(there)
        # A part of something has another shape and says nothing.
        if other is None or other.shape != value.shape:
            continue
        off = error(value, other)
        if not off <= bound:
            yield name, there[1], off


def _advice(ground: Ground, axes: tuple[str, ...], module: str | None) -> Iterator[str]:
    """Options that may help: each is tried on the smallest mesh that differs."""
    for changes in _candidates(ground.runs.options_on(axes), axes, module):
        words = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        differs = ground.differs(axes, changes)
        if differs is False:
            yield f"{words}: makes it equal, tried on {_mesh_words(ground.runs.request.mesh, axes)}"
        elif differs:
            yield f"{words}: no help, tried on {_mesh_words(ground.runs.request.mesh, axes)}"
    if "data" in axes:
        yield "look for what depends on other samples of the batch, or on how many calls came before"
    yield "num_microbatches=1, if the loss is not the mean over its samples"


def _candidates(options: Mapping[str, Any], axes: tuple[str, ...], module: str | None) -> Iterator[dict[str, Any]]:
    if "tensor" in axes:
        if module is not None:
            plan = {**(options.get("tensor_plan") or {}), f"{module}*": "replicate"}
            yield {"tensor_plan": plan}
        if options.get("replay", True):
            yield {"replay": False}
        if options.get("sequence_parallel"):
            yield {"sequence_parallel": False}
    if "pipeline" in axes and options.get("pipeline_schedule", "1f1b") not in ONE_STAGE_SCHEDULES:
        yield {"pipeline_schedule": "1f1b", "stages_per_rank": "auto", "layers_per_stage": None}
    if "data" in axes and options.get("zero_stage", 1) != 0:
        yield {"zero_stage": 0, "data_replicate_size": 1, "cpu_offload": False}
    if options.get("activation_checkpointing", "none") != "none":
        yield {"activation_checkpointing": "none"}
    if options.get("compile"):
        yield {"compile": False}


def _kind(name: str, trace: Mapping[str, Any]) -> str:
    found: str = trace["kinds"].get(name, "a module")
    return found


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _named(names: Iterable[str]) -> str:
    return few_and_more((f"'{name}'" for name in dict.fromkeys(names)), _MOST_NAMED)
