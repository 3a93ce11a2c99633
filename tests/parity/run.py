"""Runs rows on real processes. As a program: all rows, written to docs/parity.md."""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tests.parity.measure import FP32, Difference, Record, Run, bounds, compare, train
from tests.parity.pipeline_models import DEEP_FP32_INSIDE
from tests.parity.pipeline_table import PipelineRow, all_pipeline_rows, quick_pipeline_rows
from tests.parity.table import Reference, Row, all_rows, quick_rows
from tests.parity.tensor_models import FP32_INSIDE
from tests.parity.tensor_table import TensorRow, all_tensor_rows, quick_tensor_rows
from tests.spmd.pool import run_spmd

_PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
_SECONDS = 120
_BF16_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Result:
    """A row, how far it is off, and what it may be off."""

    row: Row | TensorRow | PipelineRow
    difference: Difference
    bounds: Difference

    @property
    def equal(self) -> bool:
        """Whether the row is proved."""
        return self.difference.within(self.bounds)


class Prover:
    """Runs rows, each reference once."""

    def __init__(self) -> None:
        self._references: dict[Reference, Record] = {}

    def prove(self, row: Row | TensorRow | PipelineRow) -> Result:
        """Runs a row on its mesh and its reference on one process."""
        found = record(row, row.world)
        expected = self._reference(row.reference)
        in_fp32 = None if row.precision == "64-true" else self._reference(row.reference.in_fp32())
        allowed = bounds(row.precision, expected, in_fp32)
        if row.precision == "64-true" and row.model in (*FP32_INSIDE, *DEEP_FP32_INSIDE):
            allowed = FP32
        elif row.tensor > 1 and row.precision != "64-true":
            # Each rank rounds its summands: a loss that is off by less than one rounding cannot be told from luck.
            allowed = replace(allowed, loss=max(allowed.loss, _BF16_ROUNDING))
        return Result(row, compare(found, expected), allowed)

    def _reference(self, reference: Reference) -> Record:
        if reference not in self._references:
            self._references[reference] = record(reference, 1)
        return self._references[reference]


def record(run: Run, world: int) -> Record:
    """Returns what a training on ``world`` processes did."""
    found = run_spmd(train, world, run, timeout=_SECONDS)[0]
    assert isinstance(found, Record)
    return found


def page(results: list[Result], command: str, seconds: float) -> str:
    """Returns the page of all rows."""
    failed = [result for result in results if not result.equal]
    lines = [
        "# Parity",
        "",
        "Every row trained the model for 5 clipped AdamW steps on a mesh of gloo processes, and on one process with",
        "the same global micro-batches. Columns are the largest relative differences of the two: of every loss and",
        "logged value, of the gradient norm and of every gradient at each step, of every parameter at the end.",
        "Dropout was on wherever a model has it; on the tensor axis it drew one device's masks",
        "(`tensor_random=exact`). In 64-true the bounds are 1e-12 (loss, norm), 1e-11 (gradients) and 1e-10",
        "(parameters); for a model that computes in fp32 inside 1e-5 (loss, norm) and 1e-4 (parameters, and",
        "gradients, which from the second step on are taken at these parameters); in reduced precision, 3 times the",
        "distance between one process in that precision and in fp32, and on the tensor axis at least one rounding of",
        "bf16 (2e-3) for the loss. The deep Mixtral computes in fp64 where its code says fp32, so that no rounding,",
        "which grows through its routers, hides anything.",
        "",
        "A tensor whose largest value is below a millionth of the largest of its kind is rounding of a true zero (a",
        "bias before batch normalisation, a key's bias); it is compared on the scale of the largest.",
        "",
        "In reduced precision parameters may be far apart, a few of them by more than they are large: Adam's first",
        "steps take little more of a gradient than its sign, rounding decides the sign of a small one, and a bias that",
        "began at zero is nothing but these steps. One process in that precision is as far from fp32: a third of the",
        "bound.",
        "",
        f"{len(results) - len(failed)} of {len(results)} rows are within their bounds. Made by `{command}` on "
        f"{datetime.date.today()} with torch {torch.__version__}, Python {platform.python_version()}, in "
        f"{seconds / 60:.0f} minutes.",
        "",
        "| model | mesh | precision | options | loss | norm | gradients | parameters | within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        row, off = result.row, result.difference
        numbers = [f"{value:.1e}" for value in (off.loss, off.norm, off.gradient, off.parameter)]
        verdict = "yes" if result.equal else f"**no**: {result.bounds}"
        cells = [row.model, row.mesh, row.precision, row.options, *numbers, verdict]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _rows(axis: str | None, *, every: bool) -> Iterator[Row | TensorRow | PipelineRow]:
    if axis in (None, "data"):
        yield from all_rows() if every else quick_rows()
    if axis in (None, "tensor"):
        yield from all_tensor_rows() if every else quick_tensor_rows()
    if axis in (None, "pipeline"):
        yield from all_pipeline_rows() if every else quick_pipeline_rows()


def main(arguments: Iterable[str]) -> int:
    """Runs the table; returns 1 if a row is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="all rows, and write docs/parity.md")
    parser.add_argument("--model", help="only rows of this model")
    parser.add_argument("--axis", choices=("data", "tensor", "pipeline"), help="only rows of this axis")
    options = parser.parse_args(list(arguments))
    prover, results, start = Prover(), [], time.monotonic()
    for row in _rows(options.axis, every=options.all or options.model is not None):
        if options.model and row.model != options.model:
            continue
        result = prover.prove(row)
        results.append(result)
        print(f"{'ok  ' if result.equal else 'FAIL'} {row}: {result.difference}", flush=True)
        if not result.equal:
            print(f"     bounds: {result.bounds}", flush=True)
    if options.all and not options.model and not options.axis:
        _PAGE.write_text(page(results, "make parity", time.monotonic() - start))
    return int(any(not result.equal for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
