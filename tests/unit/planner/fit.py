"""Fits the planner's constants on the published tables, and prints the table of errors: all tables, and each left out.

    python -m tests.unit.planner.fit            errors of the constants in use
    python -m tests.unit.planner.fit --fit      new constants, from those in use
    python -m tests.unit.planner.fit --leave    for each table, the errors on it of constants fitted on the others

Nothing but the tables is looked at. A step of Nelder and Mead (1965) on the logarithms of the constants; the loss is
Huber's (1964) of the logarithm of predicted over measured time, averaged in each table, tables weighed by the root of
their rows, with a weak pull to where the constants began, so that what the tables do not tell apart stays sensible.
What no time tells is taken from grids: the two constants of needed memory, and the bandwidth of a send.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from lightning_3d.planner.constants import FITTED
from tests.unit.planner import tables
from tests.unit.planner.bubbles import bubbles, waiting
from tests.unit.planner.tables import Layer, Row

# What is fitted; those with a dot belong to a cluster.
NAMES = (
    "half_width",
    "half_rows",
    "memory_passes",
    "attention_slowdown",
    "odd_heads",
    "outer_share",
    "members_power",
    "exposed",
    "block_seconds",
    "step_seconds",
    "a100.matmul_efficiency",
    "h100.matmul_efficiency",
    "jean_zay.bandwidth",
)
# What they were before any fit: measured products, links and launches, as far as anybody publishes them.
BEGINNING = (126, 173, 2.3, 2.5, 30, 0.8, 0.75, 0.22, 57e-6, 25e-3, 0.76, 0.67, 3e9)
MOST = {"outer_share": 0.95, "members_power": 1.0, "exposed": 1.0}
_PULL = 0.05
_TOLERANCE = 0.1
# Of the memory's median error and 9th decile.
_TARGETS = (0.04, 0.08)


def in_use() -> tuple[float, ...]:
    """Returns the constants in use, in the order of ``NAMES``."""
    clusters = {
        "a100.matmul_efficiency": tables.A100.matmul_efficiency,
        "h100.matmul_efficiency": tables.H100.matmul_efficiency,
        "jean_zay.bandwidth": tables.JEAN_ZAY.levels[1].bandwidth,
    }
    return tuple(clusters.get(name, getattr(FITTED, name, 0.0)) for name in NAMES)


def error(row: Row | Layer, values: Sequence[float]) -> float:
    """Returns predicted over measured time of a row, as a logarithm."""
    named = dict(zip(NAMES, values, strict=True))
    constants = replace(FITTED, **{name: value for name, value in named.items() if "." not in name})
    kind = "h100" if row.cluster.name.startswith("h100") else "a100"
    if row.cluster.name == "jean_zay" and isinstance(row, Row):
        outer = replace(row.cluster.levels[1], bandwidth=named["jean_zay.bandwidth"])
        row = replace(row, cluster=replace(row.cluster, levels=(row.cluster.levels[0], outer)))
    assert row.seconds is not None
    return math.log(row.predict_seconds(constants, named[f"{kind}.matmul_efficiency"]) / row.seconds)


def fit(rows: Sequence[Row | Layer], begin: Sequence[float], rounds: int) -> tuple[float, ...]:
    """Returns constants that predict some rows."""
    by_table: dict[str, list[Row | Layer]] = {}
    for row in rows:
        by_table.setdefault(row.table, []).append(row)

    def loss(point: Sequence[float]) -> float:
        values = [math.exp(one) for one in point]
        if any(value > MOST.get(name, math.inf) for name, value in zip(NAMES, values, strict=True)):
            return math.inf
        found = 0.0
        for some in by_table.values():
            found += math.sqrt(len(some)) * sum(_huber(error(row, values)) for row in some) / len(some)
        pull = sum((one - math.log(first)) ** 2 for one, first in zip(point, BEGINNING, strict=True))
        return found + _PULL * pull

    return tuple(math.exp(one) for one in minimise(loss, [math.log(one) for one in begin], rounds))


def minimise(loss: Callable[[Sequence[float]], float], begin: Sequence[float], rounds: int) -> list[float]:
    """Returns where a function is least, by Nelder and Mead's simplex, begun anew where it stops."""
    best, size = list(begin), len(begin)
    for step in (0.2, 0.1, 0.05):
        corners = [list(best)] + [[one + step * (at == index) for at, one in enumerate(best)] for index in range(size)]
        simplex = sorted((loss(corner), corner) for corner in corners)
        for _ in range(rounds):
            (worst, last), others = simplex[-1], simplex[:-1]
            middle = [sum(corner[at] for _, corner in others) / size for at in range(size)]
            tried = _along(loss, middle, last, 1.0)
            if tried[0] < simplex[0][0]:
                tried = min(tried, _along(loss, middle, last, 2.0))
            elif tried[0] >= simplex[-2][0]:
                tried = _along(loss, middle, last, -0.5)
            if tried[0] < worst:
                simplex = sorted([*others, tried])
                continue
            first = simplex[0][1]
            moved = [[(one + low) / 2 for one, low in zip(corner, first, strict=True)] for _, corner in simplex[1:]]
            simplex = sorted([simplex[0], *((loss(corner), corner) for corner in moved)])
        best = simplex[0][1]
    return best


def _along(
    loss: Callable[[Sequence[float]], float], middle: Sequence[float], last: Sequence[float], share: float
) -> tuple[float, list[float]]:
    """The point beyond the middle, as seen from the last one, and the loss there."""
    point = [one + share * (one - other) for one, other in zip(middle, last, strict=True)]
    return loss(point), point


def report(rows: Sequence[Row | Layer], values: Sequence[float]) -> str:
    """Returns the table of errors."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.table, []).append(math.exp(error(row, values)) - 1)
    head = f"{'table':<22} {'rows':>4} {'median':>7} {'p90':>7} {'signed':>7}"
    return "\n".join([head, *(_line(name, errors) for name, errors in found.items())])


def memory_errors(share: float, constant: float) -> tuple[list[float], int]:
    """Returns needed over measured memory less 1 of BLOOM's rows, and how many that did fit are said not to.

    Args:
        share: ``needed_share``.
        constant: ``needed_constant``.
    """
    errors, alarms = [], 0
    for row, allocated in _allocated():
        needed = share * allocated + constant
        if row.memory is not None and row.memory < math.inf:
            errors.append(needed / row.memory - 1)
            alarms += needed > row.cluster.memory
    return errors, alarms


def fit_memory() -> tuple[float, float]:
    """Returns ``needed_share`` and ``needed_constant``, of a grid, of the pairs that raise no false alarm.

    The best has the least sum of median and 9th decile, each over its target.
    """

    def loss(pair: tuple[float, float]) -> float:
        errors, alarms = memory_errors(*pair)
        sizes = [abs(one) for one in errors]
        return math.inf if alarms else quantile(sizes, 0.5) / _TARGETS[0] + quantile(sizes, 0.9) / _TARGETS[1]

    return min(((1 + one / 100, two * 0.5e9) for one in range(26) for two in range(25)), key=loss)


def fit_sends() -> float:
    """Returns ``pair_bandwidth``, of a grid: the least mean error of the published bubbles."""
    rows = [*bubbles()]

    def loss(bandwidth: float) -> float:
        constants = replace(FITTED, pair_bandwidth=bandwidth)
        return sum(abs(waiting(row.predict(constants)) - rate) for row, rate in rows)

    return min((one * 1e9 for one in range(20, 101)), key=loss)


def bubble_report() -> str:
    """Returns the errors of the published bubbles, in points."""
    errors = [100 * (waiting(row.predict()) - rate) for row, rate in bubbles()]
    sizes = [abs(one) for one in errors]
    mean, signed = sum(sizes) / len(sizes), sum(errors) / len(errors)
    return f"{'Zero Bubble, points':<22} {len(errors):>4} mean {mean:.2f}, most {max(sizes):.2f}, signed {signed:+.2f}"


@lru_cache(maxsize=1)
def _allocated() -> tuple[tuple[Row, float], ...]:
    return tuple((row, row.predict().allocated_bytes) for row in tables.bloom() if row.memory is not None)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value that a share of some values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _line(name: str, errors: Sequence[float]) -> str:
    sizes = [abs(one) for one in errors]
    median, most, signed = quantile(sizes, 0.5), quantile(sizes, 0.9), sum(errors) / len(errors)
    return f"{name:<22} {len(errors):>4} {median:>7.1%} {most:>7.1%} {signed:>+7.1%}"


def _huber(value: float) -> float:
    size = abs(value)
    return size * size / (2 * _TOLERANCE) if size < _TOLERANCE else size - _TOLERANCE / 2


def main(arguments: Sequence[str]) -> None:
    """Prints what is asked for."""
    rows, values = tables.timed(), in_use()
    if "--fit" in arguments:
        values = fit(rows, values, 150)
        share, constant = fit_memory()
        others = {"needed_share": share, "needed_constant": constant, "pair_bandwidth": fit_sends()}
        fitted = dict(zip(NAMES, values, strict=True)) | others
        print("\n".join(f"{name} = {value:.4g}" for name, value in fitted.items()))
    print(report(rows, values))
    print(_line("BLOOM memory", memory_errors(FITTED.needed_share, FITTED.needed_constant)[0]))
    print(bubble_report())
    if "--leave" in arguments:
        for name in dict.fromkeys(row.table for row in rows):
            kept = [row for row in rows if row.table != name]
            print(report([row for row in rows if row.table == name], fit(kept, values, 40)).splitlines()[1])


if __name__ == "__main__":
    main(sys.argv[1:])
