"""Runs every benchmark, one after another, and writes docs/benchmarks.md: `python -m tests.benchmarks.run`."""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
SECTIONS = {
    "data_axis": "Step times, data axis",
    "tensor_axis": "Step times, tensor axis",
    "tensor_trainer": "Whole steps, tensor axis",
    "pipeline_axis": "Step times, pipeline axis",
    "costs": "Start, memory, collectives",
    "scaling": "Scaling",
    "pipeline_bubble": "The bubble",
    "start_up": "Start-up",
    "checkpoints": "Saving",
    "replay_cost": "Host cost of a replayed block",
    "shard_operations": "Host cost of operations on shards",
}
_BEGIN, _END = "<!-- {} -->", "<!-- end of {} -->"
_HEAD = """# Benchmarks

Measured side by side in one run: the loops of a comparison take turns step by step, so that both meet the same noise of
the machine. Quartiles are those of the ratio ours / theirs of neighbouring steps; a target is met when the lower
quartile is at or below it. `make bench` makes this page (about an hour), and each section names the command of
its own. CPU and gloo throughout: what the strategy costs on the host and in collectives shows here, what kernels and
links of GPUs do does not.

"""


def section(name: str, arguments: Sequence[str] = ()) -> str:
    """Runs one benchmark and returns its part of the page.

    Raises:
        CalledProcessError: It failed.
    """
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    module = ast.parse((ROOT / "tests" / "benchmarks" / f"{name}.py").read_text())
    words = (ast.get_docstring(module) or "").partition("Prints")[0].strip()
    picture = "\n![Scaling](pictures/scaling.png)\n" if name == "scaling" else ""
    table = _tables(done.stdout)
    given = f", with `{' '.join(arguments)}`" if arguments else ""
    body = f"## {SECTIONS[name]}\n\n{words}\n\n{table}\n{picture}\nMeasured on {_machine()}{given}."
    return f"{_BEGIN.format(name)}\n{body}\n{_END.format(name)}"


def _tables(output: str) -> str:
    """The tables of an output, their titles, and what is said behind them; not what libraries say."""
    lines: list[str] = []
    for line in output.splitlines():
        if line.startswith(("**", "Not ")):
            lines += ["", line, ""]
        elif line.startswith("|---") and lines:
            # A table begins with the line before.
            lines[-1:] = ["", lines[-1], line]
        elif line.startswith("|"):
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else platform.processor()
    return (
        f"{len(os.sched_getaffinity(0))} cores of {processor}, torch {version('torch')}, "
        f"lightning {version('lightning')}, {date.today()}"
    )


def written(page: str, name: str, text: str) -> str:
    """Returns the page with one part replaced or added, the parts in their order."""
    parts = {each: part for each in SECTIONS if (part := _part(page, each)) is not None} | {name: text}
    return _HEAD + "\n\n".join(parts[each] for each in SECTIONS if each in parts) + "\n"


def _part(page: str, name: str) -> str | None:
    begin, end = _BEGIN.format(name), _END.format(name)
    return begin + page.partition(begin)[2].partition(end)[0] + end if begin in page else None


def main() -> int:
    """Writes the page, part by part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these parts")
    parser.add_argument("--steps", help="timed steps of each loop, for the parts that take some; by default their own")
    options = parser.parse_args()
    arguments = ("--steps", options.steps) if options.steps else ()
    for name in options.only:
        page = PAGE.read_text() if PAGE.exists() else ""
        print(f"{SECTIONS[name]} ...", flush=True)
        PAGE.write_text(written(page, name, section(name, arguments)))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
