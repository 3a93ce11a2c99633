"""The demo's recipe on its mesh and on one process, loss by loss: `python -m tests.parity.demo`.

Twice: against plain Lightning, and, with dropout, against this strategy on one process (plain Lightning draws other
masks; on the tensor axis those of one device are drawn by `tensor_random=exact`).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_RUN = (
    "recipe=demo",
    "test=false",
    "callbacks=none",
    "trainer.limit_val_batches=0",
    "+trainer.enable_checkpointing=false",
)
_DROPOUT = "model.model.dropout=0.1"
PAIRS = (
    ("plain Lightning", (), ("strategy=single",)),
    ("dropout 0.1", (_DROPOUT, "strategy.tensor_random=exact"), (_DROPOUT, "strategy=default", "trainer.devices=1")),
)
_LOSS = "train_loss"


def losses(overrides: Sequence[str], *, steps: int, every: int) -> dict[int, float]:
    """Trains as the command line does, and returns the logged losses by step.

    Args:
        overrides: What differs from the demo's recipe.
        steps: Optimizer steps.
        every: Steps between two logged losses.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = (f"trainer.max_steps={steps}", f"trainer.log_every_n_steps={every}", f"hydra.run.dir={directory}/run")
        command = [sys.executable, "-m", "lightning_3d", "train", *_RUN, *run, *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}")
        with (Path(directory) / "run/csv/metrics.csv").open() as file:
            return {int(row["step"]) + 1: float(row[_LOSS]) for row in csv.DictReader(file) if row[_LOSS]}


def table(title: str, mesh: Mapping[int, float], one: Mapping[int, float]) -> str:
    """Returns both curves side by side, in the digits that training prints.

    Args:
        title: What is compared.
        mesh: Losses on the mesh.
        one: Losses on one process.
    """
    assert mesh.keys() == one.keys(), "both runs log the same steps"
    rows = [f"{step:>5}  {mesh[step]:>9.4f}  {one[step]:>11.4f}" for step in mesh]
    worst = max(abs(mesh[step] - one[step]) / abs(one[step]) for step in mesh)
    verdict = "equal" if all(f"{mesh[step]:.4f}" == f"{one[step]:.4f}" for step in mesh) else "not equal"
    last = f"{verdict} in all printed digits; largest relative difference {worst:.1e}"
    return "\n".join([title, f"{'step':>5}  {'2 x 2 x 2':>9}  {'one process':>11}", *rows, last])


def main(arguments: Sequence[str]) -> int:
    """Prints the curves; returns 1 if some are not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=5)
    wanted = parser.parse_args(arguments)
    shown = []
    for title, mesh, one in PAIRS:
        curves = [losses(overrides, steps=wanted.steps, every=wanted.every) for overrides in (mesh, one)]
        shown.append(table(title, *curves))
        print(f"{shown[-1]}\n", flush=True)
    return int(any("not equal" in text for text in shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
