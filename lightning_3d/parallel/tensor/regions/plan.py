"""Local regions: modules that run on plain local weights, with one sum of their outputs over the ranks.

For code whose way depends on values, such as a loop over experts that got a token. A region copies its inputs, so that
their gradients are summed, computes with local weights as if they were whole, and sums what it returns. That is exact
for some modules and layouts only: `plan_regions` finds them, and proves each on small random values, without ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.tensor.overrides import ForcedStyle, Overrides, numberless
from lightning_3d.parallel.tensor.regions.pairs import find_pairs
from lightning_3d.parallel.tensor.regions.trial import CallSample, NoTrial, Run, Trial, trials
from lightning_3d.shards.layout import Layout

Output = Literal["sum", "same"]
# Relative; wrong regions are off by about 1. Modules that compute in fp32 inside stay far below it.
_TOLERANCE = 1e-5
_NO_PAIR = "it has no pair of weights between which it may be cut, or what follows them does more than add up"
# Gradients below it are zero.
_SMALLEST = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A module that runs on its local weights.

    Attributes:
        module: Its name.
        layouts: How its weights are cut, by their first names; the others are replicated.
        outputs: For each leaf of what it returns, in training (True) and evaluation: a "sum" over the ranks, or the
            "same" on each.
        error: The largest relative error of the proof.
    """

    module: str
    layouts: Mapping[str, Layout]
    outputs: Mapping[bool, tuple[Output, ...]]
    error: float

    def __str__(self) -> str:
        prefix = f"{self.module}."
        cut = dict.fromkeys(
            f"{numberless(name.removeprefix(prefix))} {layout}" for name, layout in self.layouts.items()
        )
        return f"{self.module}: local region ({', '.join(cut)}), proved to {self.error:.0e}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """What became of the candidates.

    Attributes:
        regions: The proved ones.
        refused: By module: why it is none, for all others.
    """

    regions: tuple[Region, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def layouts(self) -> dict[str, Layout]:
        """How the weights of all regions are cut, by their first names."""
        return {name: layout for region in self.regions for name, layout in region.layouts.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A module that may be a region.

    Attributes:
        module: Its name.
        style: What the user said, if it was the user.
    """

    module: str
    style: ForcedStyle | None = None


def region_candidates(
    module: nn.Module, overrides: Overrides, hinted: Iterable[str] = (), observed: Iterable[str] = ()
) -> tuple[Candidate, ...]:
    """Returns what may be a region: what the user named first, then hints, then what a run showed.

    A list of experts is not called itself, so the module that holds it stands for it.

    Args:
        module: The whole module.
        overrides: What the user decided.
        hinted: Modules that a model's own plan names.
        observed: Modules in which a run met values that decide what is computed.
    """
    found: dict[str, ForcedStyle | None] = {}
    for name, style in [*overrides.regions.items(), *((name, None) for name in (*hinted, *observed))]:
        called = _called(module, name)
        if called:
            found.setdefault(called, style)
    return tuple(Candidate(module=name, style=style) for name, style in found.items())


def plan_regions(
    module: nn.Module,
    parameters: ParameterTable,
    candidates: Sequence[Candidate],
    calls: Mapping[str, CallSample],
    degree: int,
    *,
    replicated: Collection[str] = (),
) -> RegionPlan:
    """Returns the candidates that are proved to be exact, and why the others are not.

    Args:
        module: The whole module; real, fake or on the meta device.
        parameters: Its parameters.
        candidates: In the order of preference; one that lies in an accepted one, or around it, is left out.
        calls: How modules are called, by name. A module of the same form as one that is listed is called as that one.
        degree: Number of tensor-parallel ranks.
        replicated: First names of weights that must not be cut.

    Raises:
        PlanError: A module that the user named cannot be exact.
    """
    regions: list[Region] = []
    refused: dict[str, str] = {}
    samples = {_form(module.get_submodule(name)): sample for name, sample in calls.items()}
    known: dict[object, _Proof | str] = {}
    for candidate in candidates:
        name = candidate.module
        if any(_overlap(name, region.module) for region in regions):
            continue
        child = module.get_submodule(name)
        first_names, cuttable = _names(name, child, parameters, replicated)
        form = _form(child)
        sample = calls.get(name, samples.get(form))
        key = (form, frozenset(cuttable), _signature(sample))
        if key not in known:
            known[key] = _prove(child, sample, degree, cuttable)
        proof = known[key]
        if isinstance(proof, _Proof):
            layouts = {first_names[each]: layout for each, layout in proof.layouts.items()}
            regions.append(Region(module=name, layouts=layouts, outputs=proof.outputs, error=proof.error))
        elif candidate.style is not None:
            raise candidate.style.refused(name, proof)
        else:
            refused[name] = proof
    return RegionPlan(regions=tuple(regions), refused=refused)


# ---- candidates ----


def _called(module: nn.Module, name: str) -> str:
    """The module of this name, or the nearest around it that has a forward."""
    while name and type(module.get_submodule(name)).forward is nn.Module.forward:
        name = name.rpartition(".")[0]
    return name


def _overlap(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _names(
    prefix: str, child: nn.Module, parameters: ParameterTable, replicated: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """First names of a region's weights by their own, and which may be cut: those that nothing else uses."""
    rows = {name: row for row in parameters.rows for name in row.names}
    first_names, cuttable = {}, []
    for name, _ in child.named_parameters():
        row = rows[f"{prefix}.{name}"]
        first_names[name] = row.name
        if row.name not in replicated and all(each.startswith(f"{prefix}.") for each in row.names):
            cuttable.append(name)
    return first_names, cuttable


def _form(module: nn.Module) -> object:
    """What is equal for modules that compute alike."""
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    return type(module), repr(module), shapes


def _signature(sample: CallSample | None) -> object:
    """What a trial reads of a sample."""
    if sample is None:
        return None
    leaves, structure = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
    return repr(structure), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )


# ---- the proof ----


@dataclass(frozen=True, slots=True)
class _Proof:
    layouts: Mapping[str, Layout]
    outputs: Mapping[bool, tuple[Output, ...]]
    error: float


def _prove(module: nn.Module, sample: CallSample | None, degree: int, cuttable: Collection[str]) -> _Proof | str:
    """Returns the largest layout that is exact, or why there is none."""
    if sample is None:
        return "the step does not call it"
    reason = ""
    try:
        for trial in trials(module, sample, degree):
            found = _largest(trial, module, degree, cuttable)
            if isinstance(found, _Proof):
                return replace(found, layouts=_full(found.layouts, module))
            reason = reason or found
    except NoTrial as failure:
        reason = reason or str(failure)
    return reason


def _largest(trial: Trial, module: nn.Module, degree: int, cuttable: Collection[str]) -> _Proof | str:
    """Returns the largest layout that is exact in a trial: all that may be cut together, or a part of it."""
    reason = ""
    together: dict[str, Layout] = {}
    alone = []
    for pair in find_pairs(trial):
        if not pair.layouts.keys() <= set(cuttable):
            continue
        if not all(layout.fits(degree) for layout in pair.layouts.values()):
            reason = reason or f"{degree} ranks do not divide its {_lengths(_full(pair.layouts, module))}"
            continue
        alone.append(pair.layouts)
        if not together.keys() & pair.layouts.keys():
            together.update(pair.layouts)
    for index, layouts in enumerate((together, *alone) if alone else ()):
        found = _exact(trial, layouts, degree)
        if isinstance(found, _Proof):
            return found
        reason = reason if index else found
    return reason or _NO_PAIR


def _full(layouts: Mapping[str, Layout], module: nn.Module) -> dict[str, Layout]:
    """Layouts of a trial, in the sizes and the order of the module."""
    full = {}
    for name, value in module.named_parameters():
        if name in layouts:
            layout = layouts[name]
            times = value.shape[layout.dim] // layout.length
            full[name] = Layout(layout.dim, tuple(times * segment for segment in layout.segments))
    return full


def _lengths(layouts: Mapping[str, Layout]) -> str:
    cut = dict.fromkeys("|".join(map(str, layout.segments)) for layout in layouts.values())
    return f"{' and '.join(cut)} features"


def _exact(trial: Trial, layouts: Mapping[str, Layout], degree: int) -> _Proof | str:
    """Runs the module whole and once for each rank on its local weights, and compares outputs and gradients."""
    outputs, largest = {}, 0.0
    for training in (True, False):
        whole = trial.run(training=training)
        unknown = next(filter(None, map(_unknown, whole.outputs)), "")
        if unknown:
            return f"an output of it {unknown} on random values, so nothing can be learned of it"
        try:
            ranks = [trial.run(_local(trial, layouts, rank, degree), training=training) for rank in range(degree)]
        except NoTrial as failure:
            return f"it does not run on a part of its weights ({failure})"
        kinds, error = _kinds(whole, ranks)
        if not error <= _TOLERANCE:
            alone = dict.fromkeys(numberless(name) for name in trial.weights if name not in layouts)
            also = f"; replicated in it: {', '.join(alone)}" if alone else ""
            return f"its outputs on parts of the weights do not add up to the whole (relative error {error:.0e}){also}"
        if "sum" not in kinds:
            return "its outputs do not depend on its weights"
        outputs[training], largest = kinds, max(largest, error)
        for name, error in _gradient_errors(whole, ranks, kinds, layouts).items():
            if not error <= _TOLERANCE:
                return (
                    f"the gradient of {name} on parts of the weights is not the whole one (relative error {error:.0e})"
                )
            largest = max(largest, error)
    return _Proof(layouts, outputs, largest)


def _local(trial: Trial, layouts: Mapping[str, Layout], rank: int, degree: int) -> dict[str, Tensor]:
    return {
        name: layouts[name].part(value, rank, degree).contiguous() if name in layouts else value
        for name, value in trial.weights.items()
    }


def _unknown(output: object) -> str:
    """Why an output tells nothing of its parts; empty if it does."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return ""
    if not output.isfinite().all():
        return "is not finite"
    return "" if output.any() else "holds nothing but zeros"


def _kinds(whole: Run, ranks: Sequence[Run]) -> tuple[tuple[Output, ...], float]:
    """What each output is, and the largest error."""
    found = [_kind(output, [run.outputs[index] for run in ranks]) for index, output in enumerate(whole.outputs)]
    return tuple(kind for kind, _ in found), max((error for _, error in found), default=0.0)


def _kind(whole: object, parts: Sequence[object]) -> tuple[Output, float]:
    """Whether the ranks' outputs are summands or equal, and how far they are from it."""
    if not isinstance(whole, Tensor):
        return "same", float(any(part != whole for part in parts))
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not whole.is_floating_point():
        return "same", float(not all(torch.equal(part, whole) for part in tensors))
    same = max(_error(part, whole) for part in tensors)
    added = _error(_total(tensors), whole)
    return ("sum", added) if added < same else ("same", same)


def _gradient_errors(
    whole: Run, ranks: Sequence[Run], kinds: Sequence[Output], layouts: Mapping[str, Layout]
) -> dict[str, float]:
    inputs, weights = whole.gradients([1.0] * len(kinds))
    # What every rank computes alike counts once.
    parts = [run.gradients([1.0 if kind == "sum" else 1.0 / len(ranks) for kind in kinds]) for run in ranks]
    errors = {
        f"input {index}": _error(_total([part[0][index] for part in parts]), value)
        for index, value in enumerate(inputs)
    }
    for name, value in weights.items():
        own = [part[1][name] for part in parts]
        errors[name] = _error(layouts[name].whole(own) if name in layouts else _total(own), value)
    return errors


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.detach() for part in parts]).sum(0)


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (found.detach() - expected.detach()).abs().max()
    error = float(difference / expected.detach().abs().max().clamp_min(_SMALLEST))
    # A NaN would be lost among others.
    return float("inf") if math.isnan(error) else error
