"""The planner's predictions against published measurements: gates that no change may break.

The constants were fitted once on these tables; docs/planner.md has the errors, those of tables left out of a fit too.
"""

import math
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import pytest

from lightning_3d.planner.constants import FITTED
from lightning_3d.planner.prediction import Prediction
from tests.unit.planner import tables
from tests.unit.planner.fit import memory_errors, quantile
from tests.unit.planner.tables import Row


@lru_cache(maxsize=1)
def predicted() -> dict[str, list[tuple[Row, Prediction]]]:
    found: dict[str, list[tuple[Row, Prediction]]] = {}
    for row in tables.timed():
        if isinstance(row, Row):
            found.setdefault(row.table, []).append((row, row.predict()))
    return found


def errors(*names: str) -> list[float]:
    pairs = [pair for name in names for pair in predicted()[name]]
    return [found.step_seconds / row.seconds - 1 for row, found in pairs if row.seconds is not None]


@pytest.mark.parametrize(
    ("names", "median", "most"),
    [
        (("SC21 table 1",), 0.06, 0.15),
        (("MPT A100 80 GB", "MPT A100 40 GB"), 0.06, 0.15),
        (("SC21 table 1", "MPT A100 80 GB", "MPT A100 40 GB"), 0.05, 0.12),
        (("Korthikanti table 5",), 0.15, 0.15),
        (("BLOOM",), 0.06, 0.15),
        (("BLOOM late",), 0.12, 0.25),
        (("Llama 3 405B",), 0.08, 0.08),
        (("torchtitan A100",), 0.10, 0.10),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_times(names: tuple[str, ...], median: float, most: float) -> None:
    sizes = [abs(error) for error in errors(*names)]
    assert quantile(sizes, 0.5) <= median
    assert quantile(sizes, 0.9) <= most


def test_what_sequence_parallelism_with_selective_recomputation_gains() -> None:
    pairs = [found for _, found in predicted()["Korthikanti table 5"]]
    for full, selective, line in zip(
        pairs[::2], pairs[1::2], tables.lines("activation_recompute_table3_5"), strict=True
    ):
        gain = full.step_seconds / selective.step_seconds - 1
        assert gain * 100 == pytest.approx(float(line["throughput_gain_pct"]), abs=7)


def test_the_times_of_one_layer() -> None:
    for row in tables.korthikanti_layers():
        assert row.predict_seconds() == pytest.approx(row.seconds, rel=0.13)


def memory_rows() -> list[Row]:
    return [row for row in tables.bloom() if row.memory is not None]


def test_memory_of_bloom() -> None:
    sizes = [
        abs(row.predict().needed_bytes / row.memory - 1)
        for row in memory_rows()
        if row.memory is not None and row.memory < float("inf")
    ]
    assert len(sizes) > 40
    assert quantile(sizes, 0.5) <= 0.05
    assert quantile(sizes, 0.9) <= 0.10


def test_what_does_not_fit() -> None:
    missed, alarms, failed = 0, 0, 0
    for row in memory_rows():
        found = row.predict()
        failed += row.memory == float("inf")
        missed += row.memory == float("inf") and found.fits
        alarms += row.memory != float("inf") and not found.fits
    assert failed == 6
    assert missed <= 1
    assert alarms == 0


def groups() -> list[list[tuple[float, float]]]:
    """Predicted and measured times of BLOOM's meshes that may be compared."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name in ("BLOOM", "BLOOM late"):
        for row, prediction in predicted()[name]:
            assert row.seconds is not None
            found.setdefault(row.group, []).append((prediction.step_seconds, row.seconds))
    return [sorted(pairs) for pairs in found.values() if len(pairs) > 1]


def regrets(top: int) -> list[float]:
    """How much slower the fastest of the first some meshes, as predicted, is than the fastest."""
    return [min(seconds for _, seconds in one[:top]) / min(seconds for _, seconds in one) - 1 for one in groups()]


def test_the_choice_among_measured_meshes_of_bloom() -> None:
    chosen = regrets(1)
    assert len(chosen) >= 6
    assert sum(chosen) / len(chosen) <= 0.05
    assert quantile(chosen, 0.5) <= 0.02
    assert quantile(regrets(3), 0.9) <= 0.02


def test_pairs_of_measured_meshes_are_ordered() -> None:
    """Of those that are more than 5 % apart; closer ones differ by the day."""
    pairs = [pair for one in groups() for pair in combinations(one, 2)]
    apart = [(one, other) for one, other in pairs if abs(math.log(one[1] / other[1])) > math.log(1.05)]
    assert len(apart) > 50
    assert sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in apart) / len(apart) >= 0.75


def test_the_page_on_the_planner_has_the_errors_of_the_constants_in_use() -> None:
    """No constant changes without its table of errors."""
    lines = (Path(__file__).parents[3] / "docs" / "planner.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    told = {name: rest[:4] for name, *rest in cells if len(rest) >= 4 and rest[0].isdigit()}
    found = {name: errors(name) for name in predicted()}
    layers = [*tables.korthikanti_layers()]
    found[layers[0].table] = [row.predict_seconds() / row.seconds - 1 for row in layers]
    found["BLOOM memory"] = memory_errors(FITTED.needed_share, FITTED.needed_constant)[0]
    assert told == {name: written(values) for name, values in found.items()}


def written(values: list[float]) -> list[str]:
    sizes = [abs(value) for value in values]
    shares = (quantile(sizes, 0.5), quantile(sizes, 0.9))
    return [
        f"{len(values)}",
        *(f"{share * 100:.1f} %" for share in shares),
        f"{sum(values) / len(values) * 100:+.1f} %",
    ]


def test_operations_as_sc21_counts_them() -> None:
    for row in tables.sc21():
        shape, batch = row.shape, row.batch.global_size
        hidden, layers, sequence = shape.hidden, shape.layers, shape.sequence
        counted = 96 * batch * sequence * layers * hidden**2
        counted *= 1 + sequence / (6 * hidden) + shape.vocab / (16 * layers * hidden)
        assert row.predict().hardware_flops == pytest.approx(counted, rel=1e-9)
        model = 72 * batch * sequence * layers * hidden**2
        model *= 1 + sequence / (6 * hidden) + shape.vocab / (12 * layers * hidden)
        assert row.predict().model_flops == pytest.approx(model, rel=1e-9)
