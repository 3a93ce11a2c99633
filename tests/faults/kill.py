"""Kills ranks at random moments. As a program: all trials, written to docs/faults.md."""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.faults.program import EVERY
from tests.faults.trials import BUSY, PROMISED, Finding, Harness, all_trials

_PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def page(findings: Sequence[Finding], command: str, seconds: float) -> str:
    """Returns the page of all trials."""
    bad = [finding for finding in findings if not finding.good]
    slowest = max((finding.seconds for finding in findings), default=0.0)
    lines = [
        "# Ranks that were killed",
        "",
        f"In every row a job trained on a mesh of gloo processes and saved every {EVERY} steps, under a name of its",
        "own and again as `last.ckpt`. One rank was killed (SIGKILL) at a random moment of what the row says. No",
        "launcher was there to end the others. *Ended*: seconds from the kill until no rank was left; each of the",
        "others has named the rank that vanished, and has ended with an error. Promised on an idle machine are",
        f"{PROMISED[False]:g} s, and {PROMISED[True]:g} s for rank 0; here {BUSY:g} times as much was allowed.",
        "",
        "*Newest*: the newest checkpoint that was left, with the step that it holds. *Equal*: each checkpoint that was",
        "left was loaded on one device, its weights and optimizer state were those that an undisturbed run had noted",
        "after that step, bit by bit, and it took the next step. In an async save the moment counts from the begin of",
        "the save, which goes on while the job trains. Where nodes have disks of their own, each node has whole",
        "checkpoints.",
        "",
        f"{len(findings) - len(bad)} of {len(findings)} are as promised; the slowest end took {slowest:.1f} s. Made by",
        f"`{command}` on {datetime.date.today()} with torch {torch.__version__}, Python {platform.python_version()},",
        f"in {seconds / 60:.0f} minutes.",
        "",
        "| mesh | doing | killed rank | moment | ended | newest | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(finding) for finding in findings]
    return "\n".join(lines) + "\n"


def _row(finding: Finding) -> str:
    newest = "; ".join("**none**" if each is None else f"{each[0]} ({each[1]})" for each in finding.newest)
    late = "" if finding.seconds < finding.limit else " **late**"
    silent = "" if finding.told and all(finding.codes) else f" **{finding.codes}**"
    ended = f"{finding.seconds:.1f} s{late}{silent}"
    trial = finding.trial
    cells = [trial.mesh, trial.doing, trial.rank, finding.moment, ended, newest, "yes" if finding.equal else "**no**"]
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Iterable[str]) -> int:
    """Runs the trials; returns 1 if one is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="only the trials of these numbers, and write nothing")
    options = parser.parse_args(list(arguments))
    # Lightning's advice for real runs.
    warnings.simplefilter("ignore")
    findings, start = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        harness = Harness(Path(directory))
        for number, trial in enumerate(all_trials()):
            if options.only and number not in options.only:
                continue
            findings.append(harness.run(trial))
            print(f"{'ok  ' if findings[-1].good else 'FAIL'} {number} {_row(findings[-1])}", flush=True)
    if not options.only:
        _PAGE.write_text(page(findings, "make faults", time.monotonic() - start))
    return int(not all(finding.good for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
