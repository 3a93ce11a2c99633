"""Two records of the same training, held against each other kind by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.verify.record import Record

# A tensor whose largest value is below this share of the largest of its kind is rounding of a true zero.
_ZERO = 1e-6
_SMALLEST = 1e-300
# Why nothing of a kind was compared.
_REASONS: Mapping[str, str] = {
    "initial weights": "the module has no state",
    "loss": "the step returns no loss",
    "logged values": "the step logs nothing",
    "gradients": "no optimizer step was taken",
    "gradient norm": "no optimizer step was taken",
    "parameters": "the module trains no parameter",
    "other state": "the module has no buffer or frozen parameter that is meant to be equal",
}
KINDS = tuple(_REASONS)
EVERYWHERE = "on all ranks"
# Without these nothing is shown.
NEEDED = ("initial weights", "gradients", "gradient norm", "parameters", EVERYWHERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The largest relative errors that rounding explains.

    Attributes:
        name: Where they come from.
        scalar: Of losses, logged values and norms.
        gradient: Of gradients.
        parameter: Of parameters, buffers and the like after the steps.
    """

    name: str
    scalar: float
    gradient: float
    parameter: float

    def of(self, kind: str) -> float:
        """Returns the bound of a kind."""
        if kind == "initial weights":
            return 0.0
        if kind == "gradients":
            return self.gradient
        return self.parameter if kind in ("parameters", "other state") else self.scalar


EXACT = Bounds(name="bits", scalar=0.0, gradient=0.0, parameter=0.0)
FP64 = Bounds(name="fp64", scalar=1e-12, gradient=1e-11, parameter=1e-10)
# From the second step on gradients are taken at parameters that differ, and differ by as much.
FP32 = Bounds(name="fp32", scalar=1e-5, gradient=1e-4, parameter=1e-4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far one thing is off.

    Attributes:
        error: Relative; infinite if there is nothing to compare it with, or if only one of both is finite.
        name: What it is, such as a parameter.
        step: Batch or optimizer step, from 0; None for what has none.
    """

    error: float
    name: str
    step: int | None = None

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return self.name if self.step is None else f"{self.name}, step {self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was found for one kind.

    Attributes:
        kind: One of `KINDS`, or `EVERYWHERE`.
        bound: The largest error that is allowed.
        differences: Of everything that was compared, in order.
        reason: Why nothing was compared; empty if something was.
    """

    kind: str
    bound: float
    differences: tuple[Difference, ...] = ()
    reason: str = ""

    @property
    def compared(self) -> int:
        """How many things were compared."""
        return len(self.differences)

    @property
    def worst(self) -> Difference | None:
        """The largest error; None if nothing was compared."""
        return max(self.differences, key=lambda each: each.error, default=None)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """What is above its bound."""
        return tuple(each for each in self.differences if not each.error <= self.bound)

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing is above its bound."""
        return bool(self.differences) and not self.wrong


def compare(found: Record, expected: Record, bounds: Bounds, *, unlike_buffers: Iterable[str] = ()) -> list[Check]:
    """Returns a check of every kind.

    Args:
        found: What the mesh did.
        expected: What one device did.
        bounds: What rounding explains.
        unlike_buffers: Names of buffers that are not meant to be equal.
    """
    unlike = set(unlike_buffers)
    trained, own_norms = set(expected.parameters), norms(expected)
    update = max((_largest_change(expected, name) for name in trained), default=0.0)
    makers: dict[str, Callable[[], Iterator[Difference]]] = {
        "initial weights": lambda: _tensors(found.start, expected.start, lambda own: own),
        "loss": lambda: _series(found.losses, expected.losses, "loss"),
        "logged values": lambda: _logged(found.logged, expected.logged),
        "gradients": lambda: _gradients(found.gradients, expected.gradients),
        "gradient norm": lambda: _series(norms(found), own_norms, "norm"),
        "parameters": lambda: _tensors(
            _only(found.end, trained), _only(expected.end, trained), lambda own: _scale(own, update)
        ),
        "other state": lambda: _tensors(
            _without(found.end, trained | unlike), _without(expected.end, trained | unlike), lambda own: own
        ),
    }
    checks = []
    for kind, make in makers.items():
        differences = tuple(make())
        reason = "" if differences else _REASONS[kind]
        if kind == "gradients" and differences and not any(own_norms):
            differences, reason = (), "every gradient is zero on one device"
        if kind == "parameters" and differences and not update:
            differences, reason = (), "the steps changed no parameter on one device"
        checks.append(Check(kind=kind, bound=bounds.of(kind), differences=differences, reason=reason))
    return checks


def same_everywhere(digests: Sequence[str]) -> Check:
    """Returns whether all ranks ended with the same bits: what one of them reports is then true of all.

    Args:
        digests: Of each rank's record.
    """
    differences = tuple(
        Difference(error=0.0 if digest == digests[0] else math.inf, name=f"rank {rank}")
        for rank, digest in enumerate(digests)
    )
    return Check(kind=EVERYWHERE, bound=0.0, differences=differences)


def reduced(name: str, own: Sequence[Check], *, least_scalar: float = 0.0) -> Bounds:
    """Returns bounds for a precision: three times its own distance from fp32 on one device.

    Args:
        name: The precision.
        own: One device in that precision, compared with one device in fp32.
        least_scalar: What losses and norms may be off in any case.
    """
    worst = {check.kind: 3 * check.worst.error for check in own if check.worst is not None}
    scalars = (worst.get(kind, 0.0) for kind in ("loss", "logged values", "gradient norm"))
    return Bounds(
        name=f"three times the distance of {name} from fp32 on one device",
        scalar=max(least_scalar, *scalars),
        gradient=worst.get("gradients", 0.0),
        parameter=worst.get("parameters", 0.0),
    )


def norms(record: Record) -> list[float]:
    """Returns the norm of all gradients of each optimizer step."""
    return [
        math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        for gradients in record.gradients
    ]


def unlike(first: Record, second: Record) -> str:
    """Returns the first thing in which two runs differ by a bit, in words; empty if there is none."""
    for check in compare(first, second, EXACT):
        if check.wrong:
            return f"{check.kind}: {check.wrong[0].place} by {check.wrong[0].error:.1e}"
    return ""


def not_finite(record: Record) -> str:
    """Returns the first loss or norm of a run that is no finite number, in words; empty if there is none."""
    for name, series in (("loss", record.losses), ("norm", norms(record))):
        for step, value in enumerate(series):
            if not math.isfinite(value):
                return f"the {name} of step {step} is {value}"
    return ""


def _largest_change(record: Record, name: str) -> float:
    if name not in record.start or name not in record.end:
        return 0.0
    return _largest(record.end[name].double() - record.start[name].double())


def _scale(own: float, largest: float) -> float:
    return own if own >= _ZERO * largest else largest


def _series(found: Sequence[float], expected: Sequence[float], name: str) -> Iterator[Difference]:
    for step in range(max(len(found), len(expected))):
        here = step < len(found) and step < len(expected)
        error = number_error(found[step], expected[step]) if here else math.inf
        yield Difference(error=error, name=name, step=step)


def _logged(found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> Iterator[Difference]:
    for step in range(max(len(found), len(expected))):
        mine = found[step] if step < len(found) else {}
        theirs = expected[step] if step < len(expected) else {}
        for name in dict.fromkeys((*theirs, *mine)):
            error = number_error(mine[name], theirs[name]) if name in mine and name in theirs else math.inf
            yield Difference(error=error, name=name, step=step)


def _gradients(found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]) -> Iterator[Difference]:
    for step in range(max(len(found), len(expected))):
        mine = found[step] if step < len(found) else {}
        theirs = expected[step] if step < len(expected) else {}
        largest = max((_largest(each) for each in theirs.values()), default=0.0)
        for each in _tensors(mine, theirs, lambda own, largest=largest: _scale(own, largest)):  # type: ignore[misc]
            yield Difference(error=each.error, name=each.name, step=step)


def _tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: Callable[[float], float]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*expected, *found)):
        # What got no gradient on one device and zeros on the mesh, or the other way round, is the same.
        mine, theirs = found.get(name), expected.get(name)
        if mine is None or theirs is None:
            other = theirs if mine is None else mine
            assert other is not None
            yield Difference(error=0.0 if _largest(other) == 0 else math.inf, name=name)
        else:
            yield Difference(error=error(mine, theirs, scale), name=name)


def error(found: Tensor, expected: Tensor, scale: Callable[[float], float] = lambda own: own) -> float:
    """Returns max|a - b| / max|b|.

    Args:
        found: a.
        expected: b.
        scale: From max|b| to what counts in its place.
    """
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    mine, theirs = _real(found), _real(expected)
    difference = _largest(mine - theirs)
    if not math.isfinite(difference):
        return 0.0 if mine.equal(theirs) else math.inf
    return 0.0 if difference == 0 else difference / max(scale(_largest(theirs)), _SMALLEST)


def number_error(found: float, expected: float) -> float:
    """Returns |a - b| / |b|; two values that are both infinite in one way, or both no number, are no evidence."""
    if not (math.isfinite(found) and math.isfinite(expected)):
        return math.inf
    difference = abs(found - expected)
    return 0.0 if difference == 0 else difference / max(abs(expected), 1e-12)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _only(tensors: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if name in names}


def _without(tensors: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if name not in names}
