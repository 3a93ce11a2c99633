"""The numerical proof of a plan: a small part of the model on ranks that are threads, against one device.

A plan is exact by construction, so this finds mistakes of ours, and code that nobody thought of. Parameters get noise,
since zeros hide mistakes; everything is computed in fp64 where the model allows that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType

import torch
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch import LightningModule

from lightning_3d.errors import Lightning3DError, PlanError
from lightning_3d.graph.quiet import quiet
from lightning_3d.graph.stand_ins import without_optimizers
from lightning_3d.parallel.tensor.overrides import numberless
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.cache import ProofCache, proof_key
from lightning_3d.parallel.tensor.proof.copies import Names, Values, Whole, cast, whole_tensors
from lightning_3d.parallel.tensor.proof.ranks import (
    Errors,
    Outcome,
    RandomStates,
    StepCall,
    errors_of,
    run_alone,
    run_ranks,
)
from lightning_3d.parallel.tensor.proof.result import Proof, Skipped
from lightning_3d.parallel.tensor.proof.shrink import Piece, fewer_blocks, pieces, positions
from lightning_3d.units import format_bytes, format_seconds

# Relative errors; real mistakes show as 1e-2 to 1. A model in fp64 may still compute in fp32 inside.
BOUNDS = MappingProxyType({torch.float64: 1e-5, torch.float32: 1e-3})
# What a proof may take at start-up, in seconds.
STARTUP_SECONDS = 1.0
# Copies of the parameters at a time: values, gradients, both again on the ranks, and what is made on the way.
_COPIES = 6
_MOST_BYTES = 32 * 2**30
_TIMEOUT = 600.0
# Measured on one core of a server: for each parameter, and for each parameter and position.
_SECONDS_PER_ELEMENT = 1e-7
_SECONDS_PER_PRODUCT = 1e-9


def prove(
    module: LightningModule,
    call: StepCall,
    plan: TensorPlan,
    *,
    values: Values | None = None,
    most_seconds: float | None = None,
    cache: ProofCache | None = None,
) -> Proof | Skipped:
    """Runs a step on a small part of the model, on one device and on thread ranks, and compares all gradients.

    Args:
        module: The whole module as its author wrote it, real or on the meta device; it is left as it is.
        call: The step, with a real batch.
        plan: How the tensor axis holds its parameters.
        values: Initial values by name, for what is on the meta device.
        most_seconds: Do nothing if it is estimated to take longer.
        cache: Where to keep the proof for later runs.

    Raises:
        PlanError: The ranks compute something else than one device, or cannot run the step.
    """
    with quiet(module), without_optimizers(module), torch.compiler.set_stance("force_eager"):
        found = _found(module, call, plan, values, most_seconds)
    if cache is not None:
        _keep(cache, proof_key(module, call, plan), found)
    return found


def startup_proof(
    module: LightningModule,
    call: StepCall,
    plan: TensorPlan,
    *,
    values: Values | None = None,
    cache: ProofCache | None = None,
) -> Proof | Skipped:
    """Returns the proof of an earlier run, or makes one that takes about a second at most.

    Every process would find the same, so one of them calls this and tells the others.

    Args:
        module: The whole module.
        call: The step, with a real batch.
        plan: How the tensor axis holds its parameters.
        values: Initial values by name, for what is on the meta device.
        cache: Where proofs are kept; the user's own directory if None.

    Raises:
        PlanError: The ranks compute something else than one device, or cannot run the step.
    """
    cache = cache or ProofCache()
    key = proof_key(module, call, plan)
    known = None if key is None else cache.find(key)
    if known is not None:
        return known
    found = prove(module, call, plan, values=values, most_seconds=STARTUP_SECONDS)
    _keep(cache, key, found)
    return found


def _keep(cache: ProofCache, key: str | None, found: Proof | Skipped) -> None:
    if key is not None and isinstance(found, Proof):
        cache.keep(key, found)


def _found(
    module: LightningModule, call: StepCall, plan: TensorPlan, values: Values | None, most_seconds: float | None
) -> Proof | Skipped:
    """The proof on the smallest part of the model on which one is possible."""
    for region in plan.regions:
        # On parts of its weights, dropout in a region does not draw the numbers of the whole.
        module.get_submodule(region.module).eval()
    names = Names.of(module)
    missing = ""
    for piece in pieces(module, call.args, plan.size):
        with fewer_blocks(module, piece.kept):
            for dtype in BOUNDS:
                trial = _Trial(module, names, replace(call, args=cast(piece.args, dtype)), plan, piece, dtype)
                excess = trial.excess(most_seconds)
                if excess is not None:
                    return Skipped(excess)
                try:
                    return trial.run(values)
                except _NotThis as reason:
                    missing = missing or str(reason)
    return Skipped(f"the step runs on no small part of the model ({missing})")


class _NotThis(Exception):  # noqa: N818 (no error: another part is tried)
    """One device does not run a part of the model, or gives nothing to compare with."""


class _Trial:
    """One attempt, on one part of the model."""

    def __init__(
        self,
        module: LightningModule,
        names: Names,
        call: StepCall,
        plan: TensorPlan,
        piece: Piece,
        dtype: torch.dtype,
    ) -> None:
        self._module = module
        self._names = names
        self._call = call
        self._plan = replace(plan, regions=names.regions(module, plan.regions))
        self._piece = piece
        self._dtype = dtype

    def excess(self, most_seconds: float | None) -> str | None:
        """Returns why the attempt should not be made."""
        elements = sum(parameter.numel() for parameter in self._module.parameters())
        size = _COPIES * elements * self._dtype.itemsize
        if size > _MOST_BYTES:
            return f"it takes {format_bytes(size)} of memory, of {format_bytes(_MOST_BYTES)} at most"
        seconds = elements * (_SECONDS_PER_ELEMENT + positions(self._call.args) * _SECONDS_PER_PRODUCT)
        if most_seconds is None or seconds <= most_seconds:
            return None
        return (
            f"it takes about {format_seconds(seconds)}, and at start-up {format_seconds(most_seconds)} at most; "
            "`lightning-3d verify` makes it"
        )

    def run(self, values: Values | None) -> Proof:
        """Compares the ranks with one device."""
        started = time.monotonic()
        bound, errors = BOUNDS[self._dtype], None
        # What rounding turns into another choice, as of an expert, does not do so on other values too.
        for seed in range(2):
            tensors = whole_tensors(self._module, self._names.tensors, dtype=self._dtype, seed=seed, values=values)
            states = _collect_rng_states(include_cuda=False)
            with _default_dtype(self._dtype):
                errors = errors_of(self._alone(tensors, states), self._ranks(tensors, states), self._plan.layouts)
            if errors.largest <= bound:
                return self._proof(errors, time.monotonic() - started)
        assert errors is not None
        raise self._wrong(errors, bound)

    def _alone(self, tensors: Whole, states: RandomStates) -> Outcome:
        try:
            alone = run_alone(self._module, self._call, tensors, states)
        except Exception as failure:
            raise _NotThis(_first_line(failure)) from failure
        if not alone.usable:
            raise _NotThis("it gives no finite loss, or no gradients")
        return alone

    def _ranks(self, tensors: Whole, states: RandomStates) -> list[Outcome]:
        try:
            return run_ranks(self._module, self._call, tensors, states, self._plan, timeout=_TIMEOUT)
        except Lightning3DError:
            raise
        except Exception as failure:
            raise PlanError(
                f"{self._call.method} does not run on {self._plan.size} tensor-parallel ranks: {_first_line(failure)}.",
                fix="tensor_plan={'<module that fails>': 'replicate'}",
            ) from failure

    def _proof(self, errors: Errors, seconds: float) -> Proof:
        return Proof(
            ranks=self._plan.size,
            value_error=errors.value,
            parameter=errors.parameter,
            error=errors.gradient,
            parameters=len(errors.gradients),
            precision=str(self._dtype).removeprefix("torch."),
            piece=str(self._piece),
            seconds=seconds,
        )

    def _wrong(self, errors: Errors, bound: float) -> PlanError:
        name = errors.parameter
        wrong = [each for each, error in errors.gradients.items() if not error <= bound]
        found = f"the loss is off by {errors.value:.1e}"
        if wrong:
            row = next(row for row in self._plan.rows if row.name == name)
            style = row.style if row.layout is None else f"{row.style}, {row.layout}"
            found += (
                f" and {len(wrong)} of {len(errors.gradients)} gradients are wrong, most of all that of {name} "
                f"({style}) by {errors.gradient:.1e}"
            )
        cut = _cut_beside(wrong, self._plan.layouts, errors.gradients)
        glob = "<module>" if cut is None else numberless(cut.rpartition(".")[0] or cut)
        return PlanError(
            f"the tensor-parallel plan is not exact: on {self._plan.size} ranks ({self._piece}, "
            f"{self._dtype}) {found}, relative to one device.",
            valid=f"relative errors up to {bound:.0e}",
            fix=f"tensor_plan={{{glob!r}: 'replicate'}}",
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which tensors that a step makes are as precise as the others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cut_beside(wrong: Sequence[str], cut: Collection[str], errors: Mapping[str, float]) -> str | None:
    """The weight to keep whole: the worst that is cut, or else one that is cut next to the worst.

    What is whole already cannot be at fault itself. None if no gradient is wrong.
    """
    if not wrong:
        return None
    if any(name in cut for name in wrong):
        return max((name for name in wrong if name in cut), key=errors.__getitem__)
    worst = max(wrong, key=errors.__getitem__)
    return max(cut, key=lambda name: _steps_together(worst, name))


def _steps_together(one: str, other: str) -> int:
    """How far two names go the same way."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    )


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
